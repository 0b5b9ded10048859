"""Global tensors and their parts: dtypes, boxes, ranges of rows, and tensor-parallel slices."""

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
MAX_AXES = 4


@dataclass(frozen=True)
class TensorSpec:
    """A global tensor, with the shape it has in the complete model.

    Attributes:
        name: the parameter's name in the trainer's state dict.
        dtype: dtype of the published bytes; a key of `ITEM_SIZES`.
        shape: sizes of the complete tensor, with 0 to `MAX_AXES` axes.

    Raises:
        ValueError: the dtype is unknown, a size is negative, or there are too many axes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_SIZES:
            raise ValueError(
                f"{self.name}: dtype {self.dtype!r}; expected one of {', '.join(ITEM_SIZES)}"
            )
        if len(self.shape) > MAX_AXES or any(size < 0 for size in self.shape):
            raise ValueError(
                f"{self.name}: shape {self.shape}; expected at most {MAX_AXES} axes, none negative"
            )

    @property
    def item_size(self) -> int:
        """Bytes of one element."""
        return ITEM_SIZES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of the complete tensor."""
        return math.prod(self.shape) * self.item_size


@dataclass(frozen=True)
class Box:
    """An n-dimensional part of a tensor: one half-open range per axis.

    Attributes:
        start: first element on each axis, in the tensor's coordinates.
        shape: number of elements on each axis; a 0 makes the box empty.

    Raises:
        ValueError: a number is negative, or start and shape differ in length.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.start) != len(self.shape) or any(n < 0 for n in (*self.start, *self.shape)):
            raise ValueError(
                f"Box({self.start}, {self.shape}): expected as many starts as sizes, none negative"
            )

    @classmethod
    def full(cls, shape: Sequence[int]) -> Box:
        """Return the box of a complete tensor of ``shape``."""
        return cls((0,) * len(shape), tuple(shape))

    @classmethod
    def of_slices(cls, slices: Sequence[slice], shape: Sequence[int]) -> Box:
        """Return the box that ``slices`` select from ``shape``: one per axis, with a step of 1."""
        bounds = [taken.indices(size) for taken, size in zip(slices, shape, strict=True)]
        if any(step != 1 for _, _, step in bounds):
            raise ValueError(f"slices {slices}: expected a step of 1")
        return cls(
            tuple(start for start, _, _ in bounds),
            tuple(max(0, stop - start) for start, stop, _ in bounds),
        )

    @property
    def size(self) -> int:
        """Number of elements; 1 for a tensor without axes."""
        return math.prod(self.shape)

    def slices(self) -> tuple[slice, ...]:
        """Return the slices that index the tensor."""
        return tuple(
            slice(start, start + size) for start, size in zip(self.start, self.shape, strict=True)
        )


@dataclass(frozen=True)
class SliceRange:
    """The rows from ``start`` up to but not including ``stop``, counted from 0; may be empty.

    Raises:
        TypeError: if a bound is not an int.
        ValueError: if ``start`` is negative or past ``stop``.
    """

    start: int
    stop: int

    def __post_init__(self) -> None:
        for name, bound in (("start", self.start), ("stop", self.stop)):
            if not isinstance(bound, int):
                raise TypeError(f"SliceRange: {name} {bound!r}; expected an int")
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"SliceRange({self.start}, {self.stop}): expected 0 <= start <= stop")

    @property
    def size(self) -> int:
        """Number of rows."""
        return self.stop - self.start

    def as_slice(self) -> slice:
        """Return a slice that indexes a tensor, an array or a list."""
        return slice(self.start, self.stop)

    def within(self, holder: SliceRange) -> SliceRange:
        """Return these rows counted from the first row of ``holder``, a buffer that contains them.

        Raises:
            ValueError: if ``holder`` does not contain all of these rows.
        """
        if not (holder.start <= self.start and self.stop <= holder.stop):
            raise ValueError(
                f"rows {self.start}:{self.stop} are not within rows {holder.start}:{holder.stop}; "
                "intersect the two first"
            )
        return SliceRange(self.start - holder.start, self.stop - holder.start)


def intersect(source: SliceRange, target: SliceRange) -> SliceRange | None:
    """Return the rows in both a source's shard and a target's range, or None if there are none.

    All three ranges are on the global axis. `SliceRange.within` converts the shared rows to
    positions in the source's shard or the target's buffer.
    """
    start = max(source.start, target.start)
    stop = min(source.stop, target.stop)
    return SliceRange(start, stop) if start < stop else None


@dataclass(frozen=True)
class TargetTPLayout:
    """One receiver among ``world_size`` receivers that hold a tensor in shards along one axis.

    Without ``target_range`` the axis is divided as by ``torch.chunk``, the convention of FSDP2 and
    DTensor. Every shard has ``ceil(size / world_size)`` rows; the last non-empty one may be
    shorter, and those after it are empty. Five rows over four ranks are 2, 2, 1, 0.

    Attributes:
        world_size: number of receivers that share the tensor.
        rank: rank of this receiver, from 0.
        shard_axis: the axis that is divided, counted from the first.
        target_range: the rows of this receiver in any other division, such as a set of experts or
            a replicated head. Rank and world size are then ignored.

    Raises:
        TypeError: if an argument has another type.
        ValueError: if ``world_size`` is below 1, or ``rank`` or ``shard_axis`` is out of range.
    """

    world_size: int
    rank: int
    shard_axis: int = 0
    target_range: SliceRange | None = None

    def __post_init__(self) -> None:
        for name in ("world_size", "rank", "shard_axis"):
            value = getattr(self, name)
            if not isinstance(value, int):
                raise TypeError(f"TargetTPLayout: {name} {value!r}; expected an int")
        if self.target_range is not None and not isinstance(self.target_range, SliceRange):
            raise TypeError(
                f"TargetTPLayout: target_range {self.target_range!r}; expected a SliceRange or None"
            )
        if self.world_size < 1:
            raise ValueError(f"TargetTPLayout: world_size {self.world_size}; expected at least 1")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"TargetTPLayout: rank {self.rank}; expected 0 to {self.world_size - 1}, "
                f"because world_size is {self.world_size}"
            )
        if self.shard_axis < 0:
            raise ValueError(
                f"TargetTPLayout: shard_axis {self.shard_axis}; expected 0 or more, "
                "counted from the first axis"
            )

    def range_on(self, axis_size: int) -> SliceRange:
        """Return this receiver's rows of an axis with ``axis_size`` rows; may be empty.

        Raises:
            ValueError: if ``axis_size`` is negative, or ``target_range`` reaches past it.
        """
        if axis_size < 0:
            raise ValueError(f"range_on: axis_size {axis_size}; expected 0 or more")
        if self.target_range is not None:
            if self.target_range.stop > axis_size:
                raise ValueError(
                    f"target_range {self.target_range.start}:{self.target_range.stop} reaches past "
                    f"an axis of {axis_size} rows"
                )
            return self.target_range
        rows = -(-axis_size // self.world_size)
        return SliceRange(min(self.rank * rows, axis_size), min((self.rank + 1) * rows, axis_size))

    def slices(self, global_shape: Sequence[int]) -> tuple[slice, ...]:
        """Return the index of this receiver's part of a tensor, one slice per axis.

        Raises:
            ValueError: the shape has no axis ``shard_axis``, or for the reasons of `range_on`.
        """
        if self.shard_axis >= len(global_shape):
            raise ValueError(
                f"shape {tuple(global_shape)} has {len(global_shape)} axes; "
                f"shard_axis is {self.shard_axis}"
            )
        return tuple(
            self.range_on(size).as_slice() if axis == self.shard_axis else slice(0, size)
            for axis, size in enumerate(global_shape)
        )
