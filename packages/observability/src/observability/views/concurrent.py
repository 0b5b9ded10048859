"""Traces that run at the same time as a step and in its processes.

In an asynchronous run a generator works for later steps, in traces without ``rl.step``, while the
step trains. Without these traces, the generator would seem idle during the step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping
from itertools import accumulate

from observability.records import Process
from observability.views.tree import Tree


class TracesByTime:
    """Traces by time, to look up those that overlap with an interval."""

    def __init__(self, trees: Mapping[str, Tree]) -> None:
        ranges = sorted(
            (
                min(span.start_ns for span in tree.spans),
                max(span.end_ns for span in tree.spans),
                trace_id,
            )
            for trace_id, tree in trees.items()
        )
        self._trees = trees
        self._ranges = ranges
        self._starts_ns = [start_ns for start_ns, *_ in ranges]
        # Latest end up to each place, so that a search knows when no earlier trace can overlap.
        self._latest_ns = list(accumulate((end_ns for _, end_ns, _ in ranges), max))

    def sharing(
        self, processes: Collection[Process], start_ns: int, end_ns: int, *, without: str
    ) -> Iterator[Tree]:
        """Yield the traces that overlap with an interval and have spans of these processes.

        The trace ``without`` is omitted.
        """
        shared = frozenset(processes)
        place = bisect_left(self._starts_ns, end_ns) - 1
        while place >= 0 and self._latest_ns[place] > start_ns:
            _, trace_end_ns, trace_id = self._ranges[place]
            if trace_end_ns > start_ns and trace_id != without:
                tree = self._trees[trace_id]
                if any(span.process in shared for span in tree.spans):
                    yield tree
            place -= 1
