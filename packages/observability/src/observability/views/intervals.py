"""Sets of moments, as half-open intervals in nanoseconds.

The functions accept intervals in any order, also overlapping and empty ones. They return sorted,
disjoint intervals; `total_ns` returns a number.
"""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[int, int]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of the intervals."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if start >= end:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def difference(minuend: Iterable[Interval], subtrahend: Iterable[Interval]) -> list[Interval]:
    """Return the moments of ``minuend`` that are not in ``subtrahend``."""
    holes = union(subtrahend)
    remaining = []
    first = 0  # index of the first hole that ends after the start of the current interval
    for begin, end in union(minuend):
        start = begin  # start of the part that is not processed yet
        while first < len(holes) and holes[first][1] <= start:
            first += 1
        index = first
        while index < len(holes) and holes[index][0] < end:
            if start < holes[index][0]:
                remaining.append((start, holes[index][0]))
            start = max(start, holes[index][1])
            index += 1
        if start < end:
            remaining.append((start, end))
    return remaining


def clip(intervals: Iterable[Interval], bounds: Interval) -> list[Interval]:
    """Return the moments of the intervals that are within ``bounds``."""
    return union((max(start, bounds[0]), min(end, bounds[1])) for start, end in intervals)


def total_ns(intervals: Iterable[Interval]) -> int:
    """Return the sum of the lengths of intervals; an overlap counts once per interval."""
    return sum(end - start for start, end in intervals)
