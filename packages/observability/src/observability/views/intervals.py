"""Sets of moments as sorted intervals that do not touch, in nanoseconds, half-open."""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[int, int]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The moments in any of the intervals; empty ones hold none."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if start >= end:
            continue
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def without(minuend: Iterable[Interval], taken: Iterable[Interval]) -> list[Interval]:
    """The moments of ``minuend`` that ``taken`` does not have."""
    holes = union(taken)
    found = []
    place = 0
    for begin, end in union(minuend):
        start = begin
        while place < len(holes) and holes[place][1] <= start:
            place += 1
        at = place
        while at < len(holes) and holes[at][0] < end:
            if start < holes[at][0]:
                found.append((start, holes[at][0]))
            start = max(start, holes[at][1])
            at += 1
        if start < end:
            found.append((start, end))
    return found


def clipped(intervals: Iterable[Interval], bounds: Interval) -> list[Interval]:
    """The moments of the intervals within ``bounds``."""
    return union((max(start, bounds[0]), min(end, bounds[1])) for start, end in intervals)


def length(intervals: Iterable[Interval]) -> int:
    """How many nanoseconds the intervals have together."""
    return sum(end - start for start, end in intervals)
