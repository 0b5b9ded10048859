"""The spans of one trace as a tree, even if spans are missing or their parents form a ring.

A walk starts at the roots, at each span whose parent was not received, and at one span of each
ring. So it reaches every span, and it ends. A span without any time gets the start of its nearest
ancestor that has a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from observability.records import Span
from observability.views.distinct import distinct_spans


class Tree:
    """The spans of one trace by parent.

    Attributes:
        spans: all spans by start, each once.
        roots: spans without a parent, by start.
        orphans: spans whose parent was not received, by start.
        circular: one span of each ring of parents, which becomes its top, by start.
    """

    def __init__(self, spans: Iterable[Span]) -> None:
        self.spans = tuple(
            sorted(
                _with_times(distinct_spans(spans)), key=lambda span: (span.start_ns, -span.end_ns)
            )
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
        self._circular_ids = {span.span_id for span in self.circular}

    @property
    def tops(self) -> tuple[Span, ...]:
        """The spans at which walks start: roots, then orphans, then circular spans."""
        return (*self.roots, *self.orphans, *self.circular)

    def get(self, span_id: str) -> Span | None:
        """Return a span by its id; None if it was not received."""
        return self._by_id.get(span_id)

    def children(self, span_id: str) -> tuple[Span, ...]:
        """Return the child spans of a span, by start; empty for an unknown id."""
        return tuple(self._children.get(span_id, ()))

    def ancestry(self, span_id: str) -> list[Span]:
        """Return a span and its ancestors, from the span upwards; empty for an unknown id."""
        ancestry = []
        span = self._by_id.get(span_id)
        while span is not None:
            ancestry.append(span)
            parent_id = None if span.span_id in self._circular_ids else span.parent_id
            span = None if parent_id is None else self._by_id.get(parent_id)
        return ancestry

    def walk(self) -> Iterator[tuple[Span, bool]]:
        """Yield each span twice: with True before its descendants, with False after them."""
        pending = [(span, True) for span in reversed(self.tops)]
        while pending:
            span, is_before = pending.pop()
            yield span, is_before
            if is_before:
                pending.append((span, False))
                pending += [(child, True) for child in reversed(self.children(span.span_id))]

    def _cut_rings(self) -> tuple[Span, ...]:
        """Remove the earliest span of each ring from its parent's children, and return it."""
        reached: set[str] = set()
        self._add_reachable((*self.roots, *self.orphans), reached)
        tops = []
        for span in self.spans:
            if span.span_id not in reached:
                top = min(self._ring_above(span), key=lambda each: (each.start_ns, each.span_id))
                assert top.parent_id is not None
                self._children[top.parent_id].remove(top)
                tops.append(top)
                self._add_reachable((top,), reached)
        return tuple(tops)

    def _ring_above(self, span: Span) -> list[Span]:
        """Return the ring that the ancestors of a span lead to.

        The span is not reachable from a root or an orphan, so its ancestors must lead to a ring.
        """
        indices: dict[str, int] = {}
        ancestors: list[Span] = []
        while span.span_id not in indices:
            indices[span.span_id] = len(ancestors)
            ancestors.append(span)
            assert span.parent_id is not None
            span = self._by_id[span.parent_id]
        # The first span that repeats is in the ring; those before it only lead to the ring.
        return ancestors[indices[span.span_id] :]

    def _add_reachable(self, tops: Iterable[Span], reached: set[str]) -> None:
        """Add the ids of spans and of all their descendants to ``reached``."""
        pending = list(tops)
        while pending:
            span = pending.pop()
            if span.span_id not in reached:
                reached.add(span.span_id)
                pending += self._children.get(span.span_id, ())


def _with_times(spans: Sequence[Span]) -> Sequence[Span]:
    """Return the spans, and give times to spans without any.

    Such a span gets the start of its nearest ancestor with a time, or else the earliest start.
    """
    if all(span.start_ns for span in spans):
        return spans
    by_id = {span.span_id: span for span in spans}
    starts_ns = {span.span_id: span.start_ns for span in spans if span.start_ns}
    earliest_ns = min(starts_ns.values(), default=0)
    for span in spans:
        untimed_ids: list[str] = []
        ancestor: Span | None = span
        while ancestor is not None and ancestor.span_id not in starts_ns:
            starts_ns[ancestor.span_id] = earliest_ns  # also ends the loop in a ring of parents
            untimed_ids.append(ancestor.span_id)
            parent_id = ancestor.parent_id
            ancestor = None if parent_id is None else by_id.get(parent_id)
        if ancestor is not None:
            starts_ns.update(dict.fromkeys(untimed_ids, starts_ns[ancestor.span_id]))
    return [
        span if span.start_ns else replace(span, start_ns=start_ns, end_ns=start_ns)
        for span in spans
        for start_ns in [starts_ns[span.span_id]]
    ]
