"""Sets of moments as sorted, disjoint, half-open intervals in nanoseconds."""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[int, int]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the moments in any of the intervals."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if start >= end:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def without(minuend: Iterable[Interval], taken: Iterable[Interval]) -> list[Interval]:
    """Return the moments of ``minuend`` that are not in ``taken``."""
    holes = union(taken)
    remaining = []
    place = 0
    for begin, end in union(minuend):
        start = begin
        while place < len(holes) and holes[place][1] <= start:
            place += 1
        at = place
        while at < len(holes) and holes[at][0] < end:
            if start < holes[at][0]:
                remaining.append((start, holes[at][0]))
            start = max(start, holes[at][1])
            at += 1
        if start < end:
            remaining.append((start, end))
    return remaining


def clipped(intervals: Iterable[Interval], bounds: Interval) -> list[Interval]:
    """Return the moments of the intervals within ``bounds``."""
    return union((max(start, bounds[0]), min(end, bounds[1])) for start, end in intervals)


def length(intervals: Iterable[Interval]) -> int:
    """Return the total of the intervals in nanoseconds."""
    return sum(end - start for start, end in intervals)
