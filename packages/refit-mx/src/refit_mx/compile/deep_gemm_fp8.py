"""Block-scaled fp8 for DeepGEMM: one float32 scale per block of 128 x 128 values.

The arithmetic follows ``per_block_cast_to_fp8`` in DeepGEMM's public utilities. Names and shapes
follow DeepSeek-V3's published checkpoints: ``weight`` as float8_e4m3fn, and ``weight_scale_inv``,
by which a block's stored values are multiplied to dequantize them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

import torch

from refit_mx.compile.quantizing import (
    E4M3_MAX,
    QuantizingPass,
    Selection,
    bands,
    check_finite,
    linear_weights,
    to_e4m3,
)
from refit_mx.errors import RefitConfigError
from refit_mx.manifest.format import Scalar

BLOCK = 128
"""Rows and columns of a block; the last blocks of a matrix may be smaller."""
MIN_MAGNITUDE = 1e-4
"""Lower limit of a block's largest magnitude, as in DeepGEMM; it makes the scale of a zero block
nonzero."""

ScaleFormat = Literal["float32", "ue8m0"]


class DeepGemmFp8(QuantizingPass):
    """Compile target ``deep_gemm_fp8``.

    Args:
        scale_format: ``float32`` for any scale; ``ue8m0`` for scales rounded up to a power of two,
            as DeepGEMM needs them for Blackwell. Both are stored as float32, unpacked; DeepGEMM's
            ``transform_sf_into_required_layout`` packs four exponents into an int32.
        selection: function that selects the tensors to quantize.

    Raises:
        RefitConfigError: the scale format is unknown.
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
        return {
            "weight_dtype": "float8_e4m3fn",
            "weight_layout": "row_major",
            "scale_dtype": "float32",
            "scale_format": "ue8m0" if self._powers_of_two else "float32",
            "block_rows": BLOCK,
            "block_columns": BLOCK,
        }

    def _scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[:-2], -(-shape[-2] // BLOCK), -(-shape[-1] // BLOCK))

    def _quantize(
        self, name: str, matrix: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor
    ) -> None:
        columns = matrix.shape[1]
        padded_columns = -(-columns // BLOCK) * BLOCK
        for first, stop in bands(matrix, BLOCK):
            rows = stop - first
            padded_rows = -(-rows // BLOCK) * BLOCK
            padded = torch.zeros(
                (padded_rows, padded_columns), dtype=torch.float32, device=matrix.device
            )
            padded[:rows, :columns] = matrix[first:stop]
            blocks = padded.view(padded_rows // BLOCK, BLOCK, padded_columns // BLOCK, BLOCK)
            largest = blocks.abs().amax(dim=(1, 3), keepdim=True)
            check_finite(name, largest)
            scales = largest.clamp_(min=MIN_MAGNITUDE) / E4M3_MAX
            if self._powers_of_two:
                scales = _round_up_to_power_of_two(scales)
            blocks *= 1.0 / scales
            weight[first:stop] = to_e4m3(padded[:rows, :columns])
            scale[first // BLOCK : first // BLOCK + padded_rows // BLOCK] = scales[:, 0, :, 0]


def _round_up_to_power_of_two(values: torch.Tensor) -> torch.Tensor:
    """Round positive normal floats up, by their bits: a logarithm is inexact near powers of two."""
    bits = values.view(torch.int32)
    return ((bits + 0x007FFFFF) & 0x7F800000).view(torch.float32)
