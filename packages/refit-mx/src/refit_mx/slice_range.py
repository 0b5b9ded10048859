"""Half-open ranges of rows along one axis of a global tensor, and what two of them share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SliceRange:
    """The rows ``start`` to ``stop``, without ``stop``, counted from 0. May be empty.

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
        """For indexing a tensor, an array or a list."""
        return slice(self.start, self.stop)

    def within(self, holder: SliceRange) -> SliceRange:
        """These rows as counted from the first row of ``holder``, a buffer that contains them.

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
    """The rows that a source's shard and a target's range share, or None if they share none.

    All three are counted on the global axis. `SliceRange.within` tells where the shared rows lie in
    the source's shard and in the target's buffer.
    """
    start = max(source.start, target.start)
    stop = min(source.stop, target.stop)
    return SliceRange(start, stop) if start < stop else None
