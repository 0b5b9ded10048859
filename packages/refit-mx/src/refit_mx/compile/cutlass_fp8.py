"""fp8 for cutlass' scaled matrix product: one scale per matrix or per output channel.

Scales and names follow vLLM's ``scaled_fp8_quant`` and ``weight_scale``: a value is the stored
value times the scale.
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

MIN_SCALE = 1.0 / (E4M3_MAX * 512.0)
"""Lower limit of a scale, as in vLLM's kernels; it makes the scale of a zero matrix nonzero."""

Scales = Literal["per_tensor", "per_channel"]
WeightLayout = Literal["column_major", "row_major"]


class CutlassFp8(QuantizingPass):
    """Compile target ``cutlass_fp8``.

    Args:
        scales: ``per_tensor``: shape ``[1]``, or ``[matrices]`` for a stack. ``per_channel``: one
            per row of the checkpoint's matrix, shape ``[rows, 1]`` or ``[matrices, rows, 1]``.
        weight_layout: memory layout of the kernel's operand B, the transpose ``[columns, rows]`` of
            the checkpoint's matrix. ``column_major``, for cutlass: its bytes are those of the
            checkpoint's ``[rows, columns]``, and the output has that shape. ``row_major``: the
            bytes are transposed, and the output has shape ``[columns, rows]``.
        selection: function that selects the tensors to quantize.

    Raises:
        RefitConfigError: ``scales`` or ``weight_layout`` is unknown.
    """

    name = "cutlass_fp8"
    scale_suffix = "_scale"

    def __init__(
        self,
        *,
        scales: Scales = "per_tensor",
        weight_layout: WeightLayout = "column_major",
        selection: Selection = linear_weights,
    ) -> None:
        super().__init__(selection)
        for what, value, choices in (
            ("scales", scales, get_args(Scales)),
            ("weight_layout", weight_layout, get_args(WeightLayout)),
        ):
            if value not in choices:
                raise RefitConfigError(
                    f"cutlass_fp8: {what} {value!r}; expected one of {', '.join(choices)}"
                )
        self._scales = scales
        self._weight_layout = weight_layout

    @property
    def metadata(self) -> Mapping[str, Scalar]:
        return {
            "weight_dtype": "float8_e4m3fn",
            "weight_layout": self._weight_layout,
            "scale_dtype": "float32",
            "scales": self._scales,
        }

    def _weight_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if self._weight_layout == "column_major":
            return shape
        return (*shape[:-2], shape[-1], shape[-2])

    def _scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if self._scales == "per_channel":
            return (*shape[:-1], 1)
        return shape[:-2] or (1,)

    def _quantize(
        self, name: str, matrix: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor
    ) -> None:
        rows = matrix.shape[0]
        largest = torch.zeros((rows, 1), dtype=torch.float32, device=matrix.device)
        for first, stop in bands(matrix, 1):
            largest[first:stop] = matrix[first:stop].float().abs().amax(dim=1, keepdim=True)
        check_finite(name, largest)
        if self._scales == "per_tensor":
            overall = largest.amax() if rows else largest.new_zeros(())
            scale.fill_(0).add_((overall / E4M3_MAX).clamp(min=MIN_SCALE))
            by_row = scale.reshape(1, 1).expand(rows, 1)
        else:
            scale.copy_((largest / E4M3_MAX).clamp_(min=MIN_SCALE))
            by_row = scale
        for first, stop in bands(matrix, 1):
            values = to_e4m3(matrix[first:stop].float() / by_row[first:stop])
            if self._weight_layout == "column_major":
                weight[first:stop] = values
            else:
                weight[:, first:stop] = values.t()
