"""Estimation and correction of offsets between the clocks of hosts.

The span of a call is within the span of its caller. If a call on another host seems to extend
beyond its caller, the clocks differ by at least the overhang. So each call between two hosts bounds
the offset of their clocks:

    caller, clock of host A          [--------------]
    call, clock of host B                    [-----------]
                                                    |----|  B is ahead by at least this

If the bounds of two hosts contradict each other, some calls outlived their callers. All calls
between these two hosts are then ignored. The times of each host are shifted by the smallest offset
within its bounds. A clock whose offset may be 0 is not corrected, unless the offsets of other
clocks make 0 impossible.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import inf

from observability.records import Event, Span
from observability.views.tree import Tree

MIN_NS = 1_000_000
"""Minimum correction: clocks synchronized by NTP may also disagree by up to this."""

_MAX_VISITS = 2_000_000
"""Maximum number of visits to hosts, which take about a second in total.

The clocks of a trace that needs more visits are not corrected.
"""

_Bounds = tuple[float, float]
"""Minimum and maximum of an offset in nanoseconds; infinite if unbounded."""

_CallBounds = dict[str, dict[str, _Bounds]]
"""Bounds of clock b's offset from clock a, as ``bounds[a][b]``."""


class _Unsolvable(Exception):
    """No offsets are within all bounds, or their search takes too many visits."""


def clock_offsets(tree: Tree, root: Span | None) -> dict[str, int]:
    """Return the offsets of the clocks that disagree with the clock of the root's host.

    Returns:
        Minimum number of nanoseconds by which a clock is ahead, by host; negative if it is behind.
        Empty without a root.
    """
    calls = _call_bounds(tree)
    if root is None or root.process.host not in calls:
        return {}
    solver = _OffsetSolver(calls)
    try:
        solver.set_offset(root.process.host, 0.0)
        # First decide the clocks that must be wrong: their offsets narrow the bounds of the others.
        while (wrong := solver.next_wrong_host()) is not None:
            solver.set_offset(wrong, solver.smallest_offset(wrong))
        # Each of the other clocks may be right, but perhaps not all of them together.
        for host in sorted(calls):
            if solver.is_connected(host):
                solver.set_offset(host, solver.smallest_offset(host))
    except _Unsolvable:
        return {}
    return {
        host: int(offset)
        for host, offset in sorted(solver.offsets.items())
        if abs(offset) >= MIN_NS
    }


class _OffsetSolver:
    """The bounds of each clock's offset from the root's clock, and the offsets decided so far.

    It covers only hosts that are connected to the root's host by calls.

    Attributes:
        offsets: decided offset of each host; positive if its clock is ahead.
    """

    def __init__(self, calls: _CallBounds) -> None:
        self._calls = calls
        self._bounds: dict[str, _Bounds] = {}
        self._visits = 0
        self.offsets: dict[str, float] = {}

    def is_connected(self, host: str) -> bool:
        """Return whether calls connect the host to the root's host."""
        return host in self._bounds

    def smallest_offset(self, host: str) -> float:
        """Return the offset within the host's bounds that is closest to 0."""
        low, high = self._bounds[host]
        return min(max(0.0, low), high)

    def next_wrong_host(self) -> str | None:
        """Return an undecided host whose clock must be wrong; None if there is none.

        Raises:
            _Unsolvable: there were too many visits.
        """
        self._visit(len(self._bounds))
        return next(
            (
                host  # in the order in which bounds reached it: hosts next to the root's first
                for host, (low, high) in self._bounds.items()
                if host not in self.offsets and not low <= 0 <= high
            ),
            None,
        )

    def set_offset(self, host: str, offset: float) -> None:
        """Decide the offset of a host and narrow the bounds of the others.

        Raises:
            _Unsolvable: another host has no offset that is consistent with it, or there were too
                many visits.
        """
        self.offsets[host] = offset
        self._bounds[host] = (offset, offset)
        pending = deque([host])
        while pending:
            current = pending.popleft()
            low, high = self._bounds[current]
            for other, (minimum, maximum) in self._calls[current].items():
                self._visit(1)
                before = self._bounds.get(other, (-inf, inf))
                # offset(other from root) = offset(current from root) + offset(other from current)
                after = max(before[0], low + minimum), min(before[1], high + maximum)
                if after[0] > after[1]:
                    raise _Unsolvable
                if after != before:
                    self._bounds[other] = after
                    pending.append(other)

    def _visit(self, hosts: int) -> None:
        self._visits += hosts
        if self._visits > _MAX_VISITS:
            raise _Unsolvable


def align_clocks(
    tree: Tree, events: Iterable[Event], offsets: Mapping[str, int]
) -> tuple[Tree, tuple[Event, ...]]:
    """Return a tree and its events with their times converted to the root's clock.

    Args:
        tree: the spans of a trace.
        events: the events of the trace.
        offsets: result of `clock_offsets` for the tree.
    """
    if not offsets:
        return tree, tuple(events)
    return Tree(_align_span(span, offsets) for span in tree.spans), tuple(
        sorted((align_event(event, offsets) for event in events), key=lambda event: event.time_ns)
    )


def _align_span(span: Span, offsets: Mapping[str, int]) -> Span:
    offset = offsets.get(span.process.host, 0)
    if not offset:
        return span
    return replace(span, start_ns=span.start_ns - offset, end_ns=span.end_ns - offset)


def align_event(event: Event, offsets: Mapping[str, int]) -> Event:
    """Return the event with its time converted to the root's clock."""
    offset = offsets.get(event.process.host, 0)
    return replace(event, time_ns=event.time_ns - offset) if offset else event


def _call_bounds(tree: Tree) -> _CallBounds:
    """Return the bounds of clock offsets that follow from the calls of a trace."""
    bounds: _CallBounds = {}
    for caller in tree.spans:
        for call in tree.children(caller.span_id):
            host, other = caller.process.host, call.process.host
            if host == other or not host or not other:
                continue
            minimum, maximum = bounds.setdefault(host, {}).get(other, (-inf, inf))
            # A call does not begin before its caller. So the other clock is ahead at most by the
            # time from the start of the caller to the start of the call.
            if caller.has_start and call.has_start:
                maximum = min(maximum, call.start_ns - caller.start_ns)
            # A synchronous call ends before its caller. So the other clock is ahead at least by
            # the time from the end of the caller to the end of the call.
            is_asynchronous = caller.kind == "producer" or call.kind == "consumer"
            if not is_asynchronous and caller.has_end and call.has_end:
                minimum = max(minimum, call.end_ns - caller.end_ns)
            bounds[host][other] = minimum, maximum
            bounds.setdefault(other, {})[host] = -maximum, -minimum
    for host, others in bounds.items():  # omit hosts whose calls contradict each other
        bounds[host] = {
            other: (low, high) for other, (low, high) in sorted(others.items()) if low <= high
        }
    return bounds
