"""Assignment of a process's spans to threads of a trace viewer, so that none hides another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

from observability.records import Span

Key: TypeAlias = tuple[str, str]
"""Trace and span id."""

Line: TypeAlias = Callable[[Span], list[Span]]
"""Function that returns a span and its ancestors, from the span upwards."""


def key_of(span: Span) -> Key:
    """Return the key of a span, unique across traces."""
    return span.trace_id, span.span_id


def threads(spans: Iterable[Span], line: Line) -> dict[Key, int]:
    """Return the thread of each span, from 0: spans of one thread are disjoint or nested.

    A span stays on its parent's thread if possible.

    Args:
        spans: the spans of one process.
        line: function that returns a span and its ancestors.
    """
    placed: dict[Key, int] = {}
    # Ends of the open spans of each thread, outermost first.
    open_ends: list[list[int]] = []
    for span in _outer_first(spans, line):
        above = _above(span, line, placed)
        for thread in [*([] if above is None else [above]), *range(len(open_ends) + 1)]:
            if thread == len(open_ends):
                open_ends.append([])
            ends = open_ends[thread]
            while ends and ends[-1] <= span.start_ns:
                ends.pop()
            if not ends or span.end_ns <= ends[-1]:
                ends.append(max(span.end_ns, span.start_ns))
                placed[key_of(span)] = thread
                break
    return placed


def _outer_first(spans: Iterable[Span], line: Line) -> list[Span]:
    """Sort spans by start, then longer ones first, then parents before children."""
    return sorted(spans, key=lambda span: (span.start_ns, -span.end_ns, len(line(span))))


def _above(span: Span, line: Line, placed: Mapping[Key, int]) -> int | None:
    """Return the thread of the nearest placed ancestor, or None."""
    places = (placed.get(key_of(ancestor)) for ancestor in line(span)[1:])
    return next((place for place in places if place is not None), None)
