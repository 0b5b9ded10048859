"""DeepGEMM's block-scaled fp8: one float32 scale for each block of 128 x 128 values.

The arithmetic is that of ``per_block_cast_to_fp8`` in DeepGEMM's public utilities, and names and
shapes are those of DeepSeek-V3's published checkpoints: ``weight`` as float8_e4m3fn and
``weight_scale_inv``, with which a block is multiplied to get its values back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

import torch

from refit_mx.compile.quantising import (
    E4M3_MAX,
    QuantisingPass,
    bands,
    refuse_values_that_are_not_finite,
    to_e4m3,
)
from refit_mx.compile.selection import Selection, linear_weights
from refit_mx.errors import RefitConfigError
from refit_mx.manifest import Scalar

BLOCK = 128
"""Rows and columns of a block; the last ones of a matrix may be smaller."""
SMALLEST_LARGEST = 1e-4
"""A block's largest magnitude counts as at least this, as in DeepGEMM; so a block of zeros has a
scale that is not zero."""

ScaleFormat = Literal["float32", "ue8m0"]


class DeepGemmFp8(QuantisingPass):
    """Compile target ``deep_gemm_fp8``.

    Args:
        scale_format: ``float32``, any scale; or ``ue8m0``, scales rounded up to a power of two, as
            DeepGEMM wants them for Blackwell. Both are stored as float32, unpacked; packing four
            exponents into an int32 is left to DeepGEMM's ``transform_sf_into_required_layout``.
        selection: which tensors to quantise.

    Raises:
        RefitConfigError: an unknown scale format.
    """

    name = "deep_gemm_fp8"
    scale_suffix = "_scale_inv"

    def __init__(
        self, *, scale_format: ScaleFormat = "float32", selection: Selection = linear_weights
    ) -> None:
        super().__init__(selection)
        if scale_format not in get_args(ScaleFormat):
            raise RefitConfigError(
                f"deep_gemm_fp8: scale_format {scale_format!r}; "
                f"expected one of {', '.join(get_args(ScaleFormat))}"
            )
        self._powers_of_two = scale_format == "ue8m0"

    @property
    def metadata(self) -> Mapping[str, Scalar]:
        """See `CompilePass.metadata`."""
        return {
            "weight_dtype": "float8_e4m3fn",
            "weight_layout": "row_major",
            "scale_dtype": "float32",
            "scale_format": "ue8m0" if self._powers_of_two else "float32",
            "block_rows": BLOCK,
            "block_columns": BLOCK,
        }

    def _weight_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape

    def _scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[:-2], -(-shape[-2] // BLOCK), -(-shape[-1] // BLOCK))

    def _quantise(
        self, name: str, matrix: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor
    ) -> None:
        columns = matrix.shape[1]
        whole_columns = -(-columns // BLOCK) * BLOCK
        for first, stop in bands(matrix, BLOCK):
            rows = stop - first
            whole_rows = -(-rows // BLOCK) * BLOCK
            padded = torch.zeros(
                (whole_rows, whole_columns), dtype=torch.float32, device=matrix.device
            )
            padded[:rows, :columns] = matrix[first:stop]
            blocks = padded.view(whole_rows // BLOCK, BLOCK, whole_columns // BLOCK, BLOCK)
            largest = blocks.abs().amax(dim=(1, 3), keepdim=True)
            refuse_values_that_are_not_finite(name, largest)
            scales = largest.clamp_(min=SMALLEST_LARGEST) / E4M3_MAX
            if self._powers_of_two:
                scales = _rounded_up_to_a_power_of_two(scales)
            blocks *= 1.0 / scales
            weight[first:stop] = to_e4m3(padded[:rows, :columns])
            scale[first // BLOCK : first // BLOCK + whole_rows // BLOCK] = scales[:, 0, :, 0]


def _rounded_up_to_a_power_of_two(values: torch.Tensor) -> torch.Tensor:
    """Of positive normal float32. By their bits, since a logarithm is off near a power of two."""
    bits = values.view(torch.int32)
    return ((bits + 0x007FFFFF) & 0x7F800000).view(torch.float32)
