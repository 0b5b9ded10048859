"""First-fit allocator of byte ranges in one memory.

An allocation goes to the lowest address with enough free space. Writing to fresh pages is many
times slower than writing to used ones, so packing towards the start keeps puts fast.

Byte ranges are exact: `Allocator.allocate` aligns the start but not the size, and `Allocator.free`
accepts any part of an allocation. An example of 256 bytes::

    0         64        128       192       256
    |aaaaaaaaa|aaaaa....|bbbbbbbbb|.........|   starts = [100, 192]    a: allocate(100) -> 0
                    100           192           stops  = [128, 256]    b: allocate(64) -> 128

    From this state, either of these calls:
    allocate(60)       aligned extents: 0 bytes at 128, 64 bytes at 192; so it returns 192
    free([(0, 100)])   joins the range with [100, 128):  starts = [0, 192], stops = [128, 256]
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

ALIGNMENT = 64
"""Alignment of every allocation's start, in bytes: a cache line."""


class Allocator:
    """Allocator of a memory of fixed size.

    Args:
        capacity: size of the memory in bytes.
    """

    __slots__ = ("_free_bytes", "_starts", "_stops", "capacity")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        # Free extents, ascending, neither empty nor touching each other.
        full = capacity > 0
        self._starts: NDArray[np.int64] = np.zeros(int(full), np.int64)
        self._stops: NDArray[np.int64] = np.full(int(full), capacity, np.int64)
        self._free_bytes = capacity

    @property
    def free_bytes(self) -> int:
        """Total of free bytes over all extents."""
        return self._free_bytes

    @property
    def largest_free(self) -> int:
        """Largest size that `allocate` would grant now, in bytes."""
        if not self._starts.size:
            return 0
        return max(0, int((self._stops - _aligned(self._starts)).max()))

    def allocate(self, nbytes: int) -> int | None:
        """Allocate ``nbytes`` contiguous bytes.

        Returns:
            The offset, a multiple of `ALIGNMENT`; None if no free extent is large enough. Zero
            bytes are granted at offset 0 and use no memory.
        """
        if nbytes == 0:
            return 0
        if nbytes > self._free_bytes:
            return None
        offsets = _aligned(self._starts)
        fits = self._stops - offsets >= nbytes
        at = int(fits.argmax())
        if not fits[at]:
            return None
        offset = int(offsets[at])
        start, stop = int(self._starts[at]), int(self._stops[at])
        end = offset + nbytes
        if start == offset and end < stop:
            self._starts[at] = end
        else:
            left = [(start, offset)] if start < offset else []
            right = [(end, stop)] if end < stop else []
            self._replace(at, left + right)
        self._free_bytes -= nbytes
        return offset

    def free(self, ranges: Iterable[tuple[int, int]] | NDArray[np.int64]) -> None:
        """Free byte ranges ``(start, stop)`` in any order; all of them or, on an error, none.

        Raises:
            ValueError: a byte is outside the memory, already free, or in two ranges.
        """
        pairs = ranges if isinstance(ranges, np.ndarray) else np.array(list(ranges), np.int64)
        if not pairs.size:
            return
        starts, stops = pairs[:, 0], pairs[:, 1]
        if (starts > stops).any() or starts.min() < 0 or stops.max() > self.capacity:
            raise ValueError(
                f"free: {starts.min()}..{stops.max()}; expected ranges with start <= stop within "
                f"{self.capacity} bytes"
            )
        # Sort and drop empty ranges only if needed: the catalogue mostly frees in ascending order.
        if (starts[1:] < stops[:-1]).any() or (starts == stops).any():
            filled = starts < stops
            starts, stops = starts[filled], stops[filled]
            order = starts.argsort(kind="stable")
            starts, stops = starts[order], stops[order]
            if (starts[1:] < stops[:-1]).any():
                raise ValueError("free: two ranges overlap")
            if not starts.size:
                return
        freed = int((stops - starts).sum())
        starts, stops = _joined(starts, stops)
        # A range (a, b) is allocated if no part of it is free. `after` is the first free extent
        # that stops after a, so it must start at b or later: self._starts[after] >= b
        #   free    [....]      [......]
        #                  a b  ^ after
        after = self._stops.searchsorted(starts, side="right")
        within = after < self._starts.size
        overlaps_free = within.copy()
        overlaps_free[within] = self._starts[after[within]] < stops[within]
        if overlaps_free.any():
            at = int(overlaps_free.argmax())
            raise ValueError(f"free: {starts[at]}..{stops[at]} is not allocated")
        # Only the free extents low..high (exclusive) can touch a range: from the one just before
        # the first range to the one just after the last range. Only these are merged.
        low = max(0, int(after[0]) - 1)
        high = int(after[-1]) + 1
        merged_starts = np.concatenate((self._starts[low:high], starts))
        merged_stops = np.concatenate((self._stops[low:high], stops))
        order = merged_starts.argsort(kind="stable")
        joined = _joined(merged_starts[order], merged_stops[order])
        self._starts = np.concatenate((self._starts[:low], joined[0], self._starts[high:]))
        self._stops = np.concatenate((self._stops[:low], joined[1], self._stops[high:]))
        self._free_bytes += freed

    def _replace(self, at: int, extents: Sequence[tuple[int, int]]) -> None:
        new = np.array(extents, np.int64).reshape(-1, 2)
        self._starts = np.concatenate((self._starts[:at], new[:, 0], self._starts[at + 1 :]))
        self._stops = np.concatenate((self._stops[:at], new[:, 1], self._stops[at + 1 :]))


def _aligned(offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    return (offsets + (ALIGNMENT - 1)) & -ALIGNMENT


def _joined(
    starts: NDArray[np.int64], stops: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Merge ascending ranges that touch."""
    gaps = starts[1:] != stops[:-1]
    return starts[np.concatenate(([True], gaps))], stops[np.concatenate((gaps, [True]))]
