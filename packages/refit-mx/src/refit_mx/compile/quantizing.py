"""Common code of the fp8 passes: selecting, checking and naming tensors, and bands of rows.

A pass differs only in how it scales one matrix.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from refit_mx.errors import CompileError, CompileTargetError
from refit_mx.layout import TensorSpec
from refit_mx.manifest.format import Scalar

E4M3_MAX = 448.0
"""Largest finite value of float8_e4m3fn."""
BAND_ELEMENTS = 1 << 24
"""Elements widened to float32 at a time, so that a large matrix needs no second copy."""


Selection = Callable[[TensorSpec], bool]
"""Function that returns whether to quantize a tensor."""

RAW_DTYPES = frozenset({"float32", "bfloat16", "float16"})
"""Input dtypes of a quantizing pass."""

# Tensors that published fp8 checkpoints leave unquantized: embeddings, small tensors with a large
# effect (norms, routers), and the last layer.
_NOT_QUANTIZED = re.compile(
    r"(^|\.)("
    r"\w*embed\w*|wte|wpe|\w*norm\w*|ln_\w+|lm_head|output_layer|router|shared_expert_gate"
    r")(\.|$)|\.(mlp|block_sparse_moe)\.gate\.weight$"
)
# Stacked experts have the projection in the last part of the name: `experts.w13_weight`.
_STACKED = re.compile(r"(^|\.)experts\.(\w+\.)*(\w+_)?weight$")


def linear_weights(spec: TensorSpec) -> bool:
    """Select matrices with a name ending in ``.weight``, and weights of experts, also if stacked.

    Embeddings, norms, routers, ``lm_head`` and biases are not selected. Dtypes are not considered:
    a pass refuses a selected tensor with a dtype outside `RAW_DTYPES`.
    """
    if _NOT_QUANTIZED.search(spec.name):
        return False
    if len(spec.shape) == 3:
        return _STACKED.search(spec.name) is not None
    if len(spec.shape) != 2:
        return False
    return spec.name.endswith(".weight") or _STACKED.search(spec.name) is not None


class QuantizingPass(ABC):
    """Quantization of selected weights to float8_e4m3fn, each with a tensor of scales.

    A tensor of two axes is one matrix ``[rows, columns]`` as in the checkpoint, output features
    first. A tensor of three axes is a stack of matrices, each quantized separately. Values that are
    not finite are refused, since a NaN in a scale corrupts all values that it scales.
    """

    name: str
    accepts = frozenset({"hf_raw"})
    scale_suffix: str

    def __init__(self, selection: Selection = linear_weights) -> None:
        self._selection = selection

    @property
    @abstractmethod
    def metadata(self) -> Mapping[str, Scalar]:
        """See `CompilePass.metadata`."""

    def _weight_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the quantized tensor."""
        return shape

    @abstractmethod
    def _scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the quantized tensor's scales."""

    @abstractmethod
    def _quantize(
        self, name: str, matrix: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor
    ) -> None:
        """Quantize one matrix into ``weight`` and ``scale``, both without the axis of a stack.

        The matrix may be empty or strided.
        """

    def check(self, specs: Sequence[TensorSpec]) -> None:
        """See `CompilePass.check`.

        Raises:
            CompileTargetError: a selected tensor has a dtype outside `RAW_DTYPES` or not two or
                three axes, or a tensor has the name of another's scale.
        """
        names = {spec.name for spec in specs}
        for spec in specs:
            if not self._selection(spec):
                continue
            if spec.dtype not in RAW_DTYPES:
                raise CompileTargetError(
                    f"{self.name}: {spec.name} is {spec.dtype}; "
                    f"expected one of {', '.join(sorted(RAW_DTYPES))}"
                )
            if len(spec.shape) not in (2, 3):
                raise CompileTargetError(
                    f"{self.name}: {spec.name} has shape {spec.shape}; expected 2 or 3 axes"
                )
            if spec.name + self.scale_suffix in names:
                raise CompileTargetError(
                    f"{self.name}: {spec.name + self.scale_suffix} is published alongside "
                    f"{spec.name}; expected raw tensors without scales"
                )

    def output_specs(self, specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        """See `CompilePass.output_specs`: the scales follow their quantized tensor."""
        outputs: list[TensorSpec] = []
        for spec in specs:
            if not self._selection(spec):
                outputs.append(spec)
                continue
            outputs.append(TensorSpec(spec.name, "float8_e4m3fn", self._weight_shape(spec.shape)))
            outputs.append(
                TensorSpec(spec.name + self.scale_suffix, "float32", self._scale_shape(spec.shape))
            )
        return tuple(outputs)

    def unchanged(self, specs: Sequence[TensorSpec]) -> frozenset[str]:
        """See `CompilePass.unchanged`: all tensors that are not selected."""
        return frozenset(spec.name for spec in specs if not self._selection(spec))

    def run(self, tensors: Mapping[str, torch.Tensor], out: Mapping[str, torch.Tensor]) -> None:
        """See `CompilePass.run`.

        Raises:
            CompileError: a selected tensor has a value that is not finite.
        """
        with torch.no_grad():
            for name, tensor in tensors.items():
                scale = out.get(name + self.scale_suffix)
                if scale is None:
                    if name in out:
                        out[name].copy_(tensor)
                elif tensor.ndim == 2:
                    self._quantize(name, tensor, out[name], scale)
                else:
                    for matrix, weight, scales in zip(tensor, out[name], scale, strict=True):
                        self._quantize(name, matrix, weight, scales)


def bands(matrix: torch.Tensor, rows_multiple: int) -> Iterator[tuple[int, int]]:
    """Yield bands of about `BAND_ELEMENTS`: the first row and the row after the last.

    Each band has a multiple of ``rows_multiple`` rows, except the last.
    """
    rows, columns = matrix.shape
    if not rows or not columns:
        return
    step = max(1, BAND_ELEMENTS // (columns * rows_multiple)) * rows_multiple
    for first in range(0, rows, step):
        yield first, min(rows, first + step)


def check_finite(name: str, largest: torch.Tensor) -> None:
    """Check largest magnitudes; a NaN or an infinity in the data is always among them.

    Raises:
        CompileError: a value is not finite.
    """
    if not bool(torch.isfinite(largest).all()):
        raise CompileError(
            f"{name}: has a NaN or an infinity, from which no fp8 scale can be computed. "
            "The old weights stay; check the trainer's gradients"
        )


def to_e4m3(scaled: torch.Tensor) -> torch.Tensor:
    """Round to the nearest float8_e4m3fn, ties to even; clamp to its range."""
    return scaled.clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
