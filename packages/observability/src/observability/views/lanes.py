"""Assignment of the spans of a process to threads of a trace viewer.

A viewer draws the spans of one thread correctly only if they are disjoint or nested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

from observability.records import Span

SpanKey: TypeAlias = tuple[str, str]
"""Trace id and span id."""

Ancestry: TypeAlias = Callable[[Span], list[Span]]
"""Function that returns a span and its ancestors, from the span upwards."""


def key_of(span: Span) -> SpanKey:
    """Return the key of a span, which is unique across traces."""
    return span.trace_id, span.span_id


def assign_threads(spans: Iterable[Span], ancestry: Ancestry) -> dict[SpanKey, int]:
    """Return the index of the thread of each span.

    The spans of a thread are disjoint or nested. A span is on the thread of its nearest ancestor if
    possible, else on the first possible thread.

    Args:
        spans: the spans of one process.
        ancestry: function that returns a span and its ancestors.
    """
    assigned: dict[SpanKey, int] = {}
    # For each thread, the ends of the spans that are open at the start of the current span,
    # outermost first.
    open_ends: list[list[int]] = []
    for span in _outer_first(spans, ancestry):
        preferred = _ancestor_thread(span, ancestry, assigned)
        for thread in [*([] if preferred is None else [preferred]), *range(len(open_ends) + 1)]:
            if thread == len(open_ends):
                open_ends.append([])
            ends = open_ends[thread]
            while ends and ends[-1] <= span.start_ns:
                ends.pop()
            if not ends or span.end_ns <= ends[-1]:
                ends.append(max(span.end_ns, span.start_ns))
                assigned[key_of(span)] = thread
                break
    return assigned


def _outer_first(spans: Iterable[Span], ancestry: Ancestry) -> list[Span]:
    """Sort spans by start, then longer ones first, then parents before children."""
    return sorted(spans, key=lambda span: (span.start_ns, -span.end_ns, len(ancestry(span))))


def _ancestor_thread(span: Span, ancestry: Ancestry, assigned: Mapping[SpanKey, int]) -> int | None:
    """Return the thread of the nearest ancestor that has one; None if there is none."""
    threads = (assigned.get(key_of(ancestor)) for ancestor in ancestry(span)[1:])
    return next((thread for thread in threads if thread is not None), None)
