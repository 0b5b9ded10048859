"""`TargetTPLayout`: which slice of a global tensor a tensor-parallel receiver needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from refit_mx.slice_range import SliceRange


@dataclass(frozen=True)
class TargetTPLayout:
    """One receiver among ``world_size`` that hold a tensor in shards along one axis.

    Without ``target_range`` the axis is divided as ``torch.chunk`` does, which is the convention of
    FSDP2 and DTensor: every shard has ``ceil(size / world_size)`` rows, the last one that has any
    may be shorter, and those after it are empty. Five rows over four ranks are 2, 2, 1, 0.

    Attributes:
        world_size: number of receivers that share the tensor.
        rank: this receiver, from 0.
        shard_axis: the axis that is divided, counted from the first.
        target_range: the rows this receiver needs, for a division that is not the one above (such
            as a set of experts or a replicated head). It stands for itself: rank and world size do
            not enter.

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
        """The rows this receiver needs of an axis of ``axis_size`` rows; may be empty.

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
        """The index of this receiver's part in a tensor of ``global_shape``, one slice an axis.

        Raises:
            ValueError: if the shape has no axis ``shard_axis``, or as `range_on`.
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
