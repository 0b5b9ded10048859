"""The dtypes that can be published, by the names that torch gives them, and their sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ITEM_SIZES: Mapping[str, int] = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes of one element."""
MOST_AXES = 4


@dataclass(frozen=True)
class TensorSpec:
    """A global tensor, as the whole model has it.

    Attributes:
        name: of the parameter, as the trainer's state dict has it.
        dtype: of the published bytes; one of `ITEM_SIZES`.
        shape: of the whole tensor, 0 to `MOST_AXES` axes.

    Raises:
        ValueError: an unknown dtype, a negative size or too many axes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_SIZES:
            raise ValueError(
                f"{self.name}: dtype {self.dtype!r}; expected one of {', '.join(ITEM_SIZES)}"
            )
        if len(self.shape) > MOST_AXES or any(size < 0 for size in self.shape):
            raise ValueError(
                f"{self.name}: shape {self.shape}; expected at most {MOST_AXES} axes, none negative"
            )

    @property
    def item_size(self) -> int:
        """Bytes of one element."""
        return ITEM_SIZES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.item_size


@dataclass(frozen=True)
class Box:
    """An n-dimensional part of a tensor: one half-open range an axis.

    Attributes:
        start: first element of each axis, counted in the tensor.
        shape: elements of each axis; one of 0 makes the box empty.

    Raises:
        ValueError: negative numbers, or different numbers of axes.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.start) != len(self.shape) or any(n < 0 for n in (*self.start, *self.shape)):
            raise ValueError(
                f"Box({self.start}, {self.shape}): expected as many starts as sizes, none negative"
            )

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """All of a tensor of ``shape``."""
        return cls((0,) * len(shape), tuple(shape))

    @classmethod
    def of_slices(cls, slices: Sequence[slice], shape: Sequence[int]) -> Box:
        """What ``slices``, one an axis and with a step of 1, take of a tensor of ``shape``."""
        bounds = [taken.indices(size) for taken, size in zip(slices, shape, strict=True)]
        if any(step != 1 for _, _, step in bounds):
            raise ValueError(f"slices {slices}: expected a step of 1")
        return cls(
            tuple(start for start, _, _ in bounds),
            tuple(max(0, stop - start) for start, stop, _ in bounds),
        )

    @property
    def size(self) -> int:
        """Number of elements; 1 of a tensor without axes."""
        return math.prod(self.shape)

    def slices(self) -> tuple[slice, ...]:
        """For indexing the tensor."""
        return tuple(
            slice(start, start + size) for start, size in zip(self.start, self.shape, strict=True)
        )
