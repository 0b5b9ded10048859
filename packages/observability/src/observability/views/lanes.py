"""Assignment of the spans of a process to threads of a trace viewer.

A viewer draws the spans of one thread correctly only if they are disjoint or nested.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from heapq import heappop, heappush
from typing import TypeAlias

from observability.records import Process, Span
from observability.views.tree import Tree

SpanKey: TypeAlias = tuple[str, str]
"""Trace id and span id."""


def key_of(span: Span) -> SpanKey:
    """Return the key of a span, which is unique across traces."""
    return span.trace_id, span.span_id


def enclosing_spans(tree: Tree) -> dict[SpanKey, SpanKey]:
    """Return the nearest ancestor in the same process, for spans with one."""
    enclosing: dict[SpanKey, SpanKey] = {}
    open_spans: defaultdict[Process, list[Span]] = defaultdict(list)
    for span, is_before in tree.walk():
        above = open_spans[span.process]
        if not is_before:
            above.pop()
            continue
        if above:
            enclosing[key_of(span)] = key_of(above[-1])
        above.append(span)
    return enclosing


def assign_threads(
    spans: Iterable[Span], enclosing: Mapping[SpanKey, SpanKey]
) -> dict[SpanKey, int]:
    """Return the index of the thread of each span.

    The spans of a thread are disjoint or nested in ancestors. A span is on the thread of its
    nearest ancestor in the process if it is nested there, else on the first thread that is free.

    Args:
        spans: the spans of one process, parents before children.
        enclosing: result of `enclosing_spans` for their traces.
    """
    assigned: dict[SpanKey, int] = {}
    # For each thread, the ends of the spans that may be open at the start of the current span,
    # outermost first. A thread is free when its outermost span is finished.
    open_ends: list[list[int]] = []
    free: list[int] = []
    busy: list[tuple[int, int]] = []  # heap of other threads: end of outermost span, index
    # By start, then longer ones first. The sort is stable, so parents precede equal children.
    for span in sorted(spans, key=lambda span: (span.start_ns, -span.end_ns)):
        while busy and busy[0][0] <= span.start_ns:
            heappush(free, heappop(busy)[1])
        end_ns = max(span.start_ns, span.end_ns)
        above = enclosing.get(key_of(span))
        thread = None if above is None else assigned.get(above)
        if thread is not None:
            ends = open_ends[thread]
            while ends and ends[-1] <= span.start_ns:
                ends.pop()
            if ends and end_ns <= ends[-1]:
                ends.append(end_ns)
            else:
                thread = None
        if thread is None:
            if not free:
                heappush(free, len(open_ends))
                open_ends.append([])
            thread = heappop(free)
            open_ends[thread] = [end_ns]
            heappush(busy, (end_ns, thread))
        assigned[key_of(span)] = thread
    return assigned
