"""What the two fp8 passes share: which tensors they take, checking, naming, and bands of rows.

A pass differs in how it scales one matrix; everything around that is here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence

import torch

from refit_mx.compile.selection import RAW_DTYPES, Selection, linear_weights
from refit_mx.errors import CompileError, CompileTargetError
from refit_mx.manifest import Scalar
from refit_mx.tensor_types import TensorSpec

E4M3_MAX = 448.0
"""Largest finite value of float8_e4m3fn."""
BAND_ELEMENTS = 1 << 24
"""Elements that are widened to float32 at a time, so that a large matrix needs no second copy."""


class QuantisingPass(ABC):
    """Quantises selected weights to float8_e4m3fn with a tensor of scales beside each.

    A tensor of two axes is one matrix ``[rows, columns]`` as the checkpoint has it, output features
    first; one of three axes is a stack of matrices, each quantised for itself. Values that are not
    finite are refused, since one NaN in a scale spoils every value that it scales.

    Args:
        selection: which tensors to quantise; all others pass through unchanged.
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

    @abstractmethod
    def _weight_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of the quantised tensor."""

    @abstractmethod
    def _scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of its scales."""

    @abstractmethod
    def _quantise(
        self, name: str, matrix: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor
    ) -> None:
        """One matrix into ``weight``, without the axis of a stack, and ``scale`` likewise."""

    def check(self, specs: Sequence[TensorSpec]) -> None:
        """See `CompilePass.check`.

        Raises:
            CompileTargetError: a selected tensor is not of one of `RAW_DTYPES` or has not two or
                three axes, or a tensor has the name that a scale would get.
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
                    f"{self.name}: {spec.name + self.scale_suffix} is published beside "
                    f"{spec.name}; expected raw tensors without scales"
                )

    def output_specs(self, specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        """See `CompilePass.output_specs`: a quantised tensor is followed by its scales."""
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
        """See `CompilePass.unchanged`: all that is not selected."""
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
                    self._quantise(name, tensor, out[name], scale)
                else:
                    for matrix, weight, scales in zip(tensor, out[name], scale, strict=True):
                        self._quantise(name, matrix, weight, scales)


def bands(matrix: torch.Tensor, rows_multiple: int) -> Iterator[tuple[int, int]]:
    """First row and row behind the last one of parts of about `BAND_ELEMENTS`.

    Args:
        matrix: of two axes.
        rows_multiple: every part but the last has a multiple of so many rows.
    """
    rows, columns = matrix.shape
    if not rows or not columns:
        return
    step = max(1, BAND_ELEMENTS // (columns * rows_multiple)) * rows_multiple
    for first in range(0, rows, step):
        yield first, min(rows, first + step)


def refuse_values_that_are_not_finite(name: str, largest: torch.Tensor) -> None:
    """Look at largest magnitudes, in which a NaN or an infinity shows.

    Raises:
        CompileError: there is one.
    """
    if not bool(torch.isfinite(largest).all()):
        raise CompileError(
            f"{name}: has a NaN or an infinity; an fp8 scale made of it would spoil the values "
            "beside it. The old weights stay; look at the trainer's gradients"
        )


def to_e4m3(scaled: torch.Tensor) -> torch.Tensor:
    """Round to the nearest float8_e4m3fn, ties to even; beyond its range to its largest value."""
    return scaled.clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
