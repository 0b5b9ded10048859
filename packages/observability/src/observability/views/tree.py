"""The spans of one trace as a tree that is valid even if spans are missing or malformed.

Walks start at the roots, at each span whose parent did not arrive, and at one span of each ring of
parents. So no span is lost and every walk ends. A span without any time is placed at the start of
its nearest ancestor with a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from observability.records import Span
from observability.views.distinct import distinct_spans


class Tree:
    """The spans of one trace by parent.

    Attributes:
        spans: all spans by start, each once.
        roots: spans without a parent, by start.
        orphans: spans whose parent did not arrive, by start.
        circular: spans at which a ring of parents was cut, by start.
    """

    def __init__(self, spans: Iterable[Span]) -> None:
        self.spans = tuple(
            sorted(_placed(distinct_spans(spans)), key=lambda span: (span.start_ns, -span.end_ns))
        )
        self._by_id = {span.span_id: span for span in self.spans}
        self.roots = tuple(span for span in self.spans if span.parent_id is None)
        self.orphans = tuple(
            span
            for span in self.spans
            if span.parent_id is not None and span.parent_id not in self._by_id
        )
        self._children: dict[str, list[Span]] = {}
        for span in self.spans:
            if span.parent_id in self._by_id:
                self._children.setdefault(span.parent_id, []).append(span)
        self.circular = self._cut_rings()
        self._cut = {span.span_id for span in self.circular}

    @property
    def tops(self) -> tuple[Span, ...]:
        """The starts of walks: roots, then orphans, then circular spans."""
        return (*self.roots, *self.orphans, *self.circular)

    def get(self, span_id: str) -> Span | None:
        """Return a span; None if it did not arrive."""
        return self._by_id.get(span_id)

    def children(self, span_id: str) -> tuple[Span, ...]:
        """Return the child spans of a span, by start; empty for an unknown id."""
        return tuple(self._children.get(span_id, ()))

    def line(self, span_id: str) -> list[Span]:
        """Return a span and its ancestors, upwards; empty for an unknown id."""
        line = []
        span = self._by_id.get(span_id)
        while span is not None:
            line.append(span)
            above = None if span.span_id in self._cut else span.parent_id
            span = None if above is None else self._by_id.get(above)
        return line

    def _cut_rings(self) -> tuple[Span, ...]:
        reached: set[str] = set()
        self._reach((*self.roots, *self.orphans), reached)
        cut = []
        for span in self.spans:
            if span.span_id not in reached:
                top = min(self._ring_above(span), key=lambda each: (each.start_ns, each.span_id))
                assert top.parent_id is not None
                self._children[top.parent_id].remove(top)
                cut.append(top)
                self._reach((top,), reached)
        return tuple(cut)

    def _ring_above(self, span: Span) -> list[Span]:
        """Return the ring of parents that the ancestors of an unreached span lead to."""
        seen: dict[str, int] = {}
        line: list[Span] = []
        while span.span_id not in seen:
            seen[span.span_id] = len(line)
            line.append(span)
            assert span.parent_id is not None
            span = self._by_id[span.parent_id]
        return line[seen[span.span_id] :]

    def _reach(self, tops: Iterable[Span], reached: set[str]) -> None:
        waiting = list(tops)
        while waiting:
            span = waiting.pop()
            if span.span_id not in reached:
                reached.add(span.span_id)
                waiting += self._children.get(span.span_id, ())


def _placed(spans: Sequence[Span]) -> Sequence[Span]:
    """Return the spans; those without any time get the start of the nearest timed ancestor."""
    if all(span.start_ns for span in spans):
        return spans
    by_id = {span.span_id: span for span in spans}
    starts = {span.span_id: span.start_ns for span in spans if span.start_ns}
    earliest = min(starts.values(), default=0)
    for span in spans:
        line: list[str] = []
        above: Span | None = span
        while above is not None and above.span_id not in starts:
            starts[above.span_id] = earliest  # ends the walk along a ring of parents
            line.append(above.span_id)
            above = None if above.parent_id is None else by_id.get(above.parent_id)
        if above is not None:
            starts.update(dict.fromkeys(line, starts[above.span_id]))
    return [
        span if span.start_ns else replace(span, start_ns=at, end_ns=at)
        for span in spans
        for at in [starts[span.span_id]]
    ]
