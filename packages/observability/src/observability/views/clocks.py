"""Estimates of how far the clocks of hosts disagree, and the correction of times.

A call runs within its caller's span. If it does not, and the two hosts differ, one clock is ahead
of the other by at least the part that sticks out. If the calls between two hosts contradict each
other, some outlived their callers; all calls between these hosts are then ignored. Times are
shifted so that every call is within its caller, by the smallest shift that achieves it. A clock
whose offset may be 0 is left alone, unless the offsets of other clocks rule 0 out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import inf

from observability.records import Event, Span
from observability.views.tree import Tree

MIN_NS = 1_000_000
"""Minimum correction: hosts synchronized by NTP also disagree by less."""

_MAX_VISITS = 2_000_000
"""Maximum number of visits to hosts, about a second; a trace that needs more is not corrected."""

_Bounds = tuple[float, float]
_Calls = dict[str, dict[str, _Bounds]]


class _Contradiction(Exception):
    """Calls along a ring of hosts that contradict each other, or too many visits to hosts."""


def clocks_ahead(tree: Tree, root: Span | None) -> dict[str, int]:
    """Return the hosts whose clocks disagree with the clock of the root's host.

    Returns:
        Host to the minimum number of nanoseconds by which its clock is ahead; negative if it is
        behind. Empty without a root.
    """
    calls = _calls(tree)
    if root is None or root.process.host not in calls:
        return {}
    clocks = _Clocks(calls)
    try:
        clocks.fix(root.process.host, 0.0)
        # Clocks that must be wrong come first, since they narrow the bounds of others.
        while (wrong := clocks.next_wrong()) is not None:
            clocks.fix(wrong, clocks.smallest_offset(wrong))
        # Each of the others may be right, but perhaps not all of them together.
        for host in sorted(calls):
            if clocks.is_known(host):
                clocks.fix(host, clocks.smallest_offset(host))
    except _Contradiction:
        return {}
    return {host: int(at) for host, at in sorted(clocks.fixed.items()) if abs(at) >= MIN_NS}


class _Clocks:
    """The bounds of each clock's offset from the root's, for hosts connected to it by calls.

    Attributes:
        fixed: decided offset of each host; positive if its clock is ahead.
    """

    def __init__(self, calls: _Calls) -> None:
        self._calls = calls
        self._bounds: dict[str, _Bounds] = {}
        self._visits = 0
        self.fixed: dict[str, float] = {}

    def is_known(self, host: str) -> bool:
        """Return whether calls connect the host to the root's host."""
        return host in self._bounds

    def smallest_offset(self, host: str) -> float:
        """Return the smallest offset within the host's bounds."""
        low, high = self._bounds[host]
        return min(max(0.0, low), high)

    def next_wrong(self) -> str | None:
        """Return an undecided host whose clock must be wrong; None if there is none.

        Raises:
            _Contradiction: there were too many visits.
        """
        self._visit(len(self._bounds))
        return next(
            (
                host  # in order of discovery: the root's neighbors first
                for host, (low, high) in self._bounds.items()
                if host not in self.fixed and not low <= 0 <= high
            ),
            None,
        )

    def fix(self, host: str, ahead: float) -> None:
        """Decide the offset of a host and narrow the bounds of the others.

        Raises:
            _Contradiction: no offset of another host is consistent with it.
        """
        self.fixed[host] = ahead
        self._bounds[host] = (ahead, ahead)
        waiting = deque([host])
        while waiting:
            current = waiting.popleft()
            low, high = self._bounds[current]
            for other, (minimum, maximum) in self._calls[current].items():
                self._visit(1)
                before = self._bounds.get(other, (-inf, inf))
                after = max(before[0], low + minimum), min(before[1], high + maximum)
                if after[0] > after[1]:
                    raise _Contradiction
                if after != before:
                    self._bounds[other] = after
                    waiting.append(other)

    def _visit(self, hosts: int) -> None:
        self._visits += hosts
        if self._visits > _MAX_VISITS:
            raise _Contradiction


def on_one_clock(
    tree: Tree, events: Iterable[Event], ahead: Mapping[str, int]
) -> tuple[Tree, tuple[Event, ...]]:
    """Return a tree and its events with their times converted to the root's clock."""
    if not ahead:
        return tree, tuple(events)
    return Tree(moved_span(span, ahead) for span in tree.spans), tuple(
        sorted((moved_event(event, ahead) for event in events), key=lambda event: event.time_ns)
    )


def moved_span(span: Span, ahead: Mapping[str, int]) -> Span:
    """Return the span with its times converted to the root's clock."""
    shift = ahead.get(span.process.host, 0)
    if not shift:
        return span
    return replace(span, start_ns=span.start_ns - shift, end_ns=span.end_ns - shift)


def moved_event(event: Event, ahead: Mapping[str, int]) -> Event:
    """Return the event with its time converted to the root's clock."""
    shift = ahead.get(event.process.host, 0)
    return replace(event, time_ns=event.time_ns - shift) if shift else event


def _calls(tree: Tree) -> _Calls:
    """Return, by host and other host, the bounds that calls put on the other clock's offset."""
    bounds: _Calls = {}
    for caller in tree.spans:
        for called in tree.children(caller.span_id):
            host, other = caller.process.host, called.process.host
            if host == other or not host or not other:
                continue
            minimum, maximum = bounds.setdefault(host, {}).get(other, (-inf, inf))
            # No call begins before its caller. An asynchronous one may outlive its caller.
            if caller.has_start and called.has_start:
                maximum = min(maximum, called.start_ns - caller.start_ns)
            outlives = caller.kind == "producer" or called.kind == "consumer"
            if not outlives and caller.has_end and called.has_end:
                minimum = max(minimum, called.end_ns - caller.end_ns)
            bounds[host][other] = minimum, maximum
            bounds.setdefault(other, {})[host] = -maximum, -minimum
    for host, others in bounds.items():
        bounds[host] = {
            other: (low, high) for other, (low, high) in sorted(others.items()) if low <= high
        }
    return bounds
