"""Where the spans of a process are drawn, so that none hides another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

from observability.records import Span

Key: TypeAlias = tuple[str, str]
"""Trace and span id."""

Line: TypeAlias = Callable[[Span], list[Span]]
"""Gives a span and its ancestors, upwards."""


def key_of(span: Span) -> Key:
    """What a span is known by among those of several traces."""
    return span.trace_id, span.span_id


def rows(spans: Iterable[Span], line: Line) -> dict[Key, int]:
    """The row of each span, from 0 downwards: below its parent, and no two over each other.

    Args:
        spans: those of one process.
        line: the ancestors of a span.
    """
    found: dict[Key, int] = {}
    ends: list[int] = []
    for span in _outer_first(spans, line):
        above = _above(span, line, found)
        row = 0 if above is None else above + 1
        while row < len(ends) and ends[row] > span.start_ns:
            row += 1
        ends += [span.start_ns] * (row + 1 - len(ends))
        ends[row] = max(span.end_ns, span.start_ns)
        found[key_of(span)] = row
    return found


def threads(spans: Iterable[Span], line: Line) -> dict[Key, int]:
    """The thread of each span, from 0: two spans of a thread are apart, or one holds the other.

    A span stays on its parent's thread where that is possible.

    Args:
        spans: those of one process.
        line: the ancestors of a span.
    """
    found: dict[Key, int] = {}
    # Of each thread the ends of the spans that are open, outermost first.
    open_ends: list[list[int]] = []
    for span in _outer_first(spans, line):
        above = _above(span, line, found)
        for thread in [*([] if above is None else [above]), *range(len(open_ends) + 1)]:
            if thread == len(open_ends):
                open_ends.append([])
            ends = open_ends[thread]
            while ends and ends[-1] <= span.start_ns:
                ends.pop()
            if not ends or span.end_ns <= ends[-1]:
                ends.append(max(span.end_ns, span.start_ns))
                found[key_of(span)] = thread
                break
    return found


def _outer_first(spans: Iterable[Span], line: Line) -> list[Span]:
    """By start; of those that start together the longer first, of equal ones the parent."""
    return sorted(spans, key=lambda span: (span.start_ns, -span.end_ns, len(line(span))))


def _above(span: Span, line: Line, placed: Mapping[Key, int]) -> int | None:
    """Where the nearest ancestor is that has been placed."""
    places = (placed.get(key_of(ancestor)) for ancestor in line(span)[1:])
    return next((place for place in places if place is not None), None)
