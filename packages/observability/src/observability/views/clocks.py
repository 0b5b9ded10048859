"""How far the clocks of hosts disagree, from what calls say of it, and times put right by that.

A call runs within its caller's span. Where it does not, and the two are on different hosts, one
clock is ahead of the other, by at least what sticks out. All calls between two hosts have to agree
on that; if they do not, some outlived their callers, and say nothing. Times are moved so that every
call lies within its caller, and by as little as that takes: no clock is called wrong that may be
right.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import inf

from observability.records import Event, Span
from observability.views.tree import Tree

LEAST_NS = 1_000_000
"""Clocks that disagree by less are left as they are: hosts that keep time by NTP do as well."""

_MOST_LOOKS = 2_000_000
"""How often hosts are looked at, a second's worth; a trace that takes more is left as told."""

_Bounds = tuple[float, float]
_Calls = dict[str, dict[str, _Bounds]]


class _Contradiction(Exception):
    """Calls along a ring of hosts contradict each other, or there are too many."""


def clocks_ahead(tree: Tree, root: Span | None) -> dict[str, int]:
    """The hosts whose clocks disagree with that of the root's host; without a root, none.

    Returns:
        Host to nanoseconds that its clock is at least ahead, negative of one that is behind.
    """
    calls = _calls(tree)
    if root is None or root.process.host not in calls:
        return {}
    clocks = _Clocks(calls)
    try:
        clocks.fix(root.process.host, 0.0)
        # Those that cannot be right come first, since they tell of others.
        while (forced := clocks.one_that_is_wrong()) is not None:
            clocks.fix(forced, clocks.nearest_to_right(forced))
        # Each of the others may be right. Whether all of them are is another question.
        for host in sorted(calls):
            if clocks.is_known(host):
                clocks.fix(host, clocks.nearest_to_right(host))
    except _Contradiction:
        return {}
    return {host: int(at) for host, at in sorted(clocks.fixed.items()) if abs(at) >= LEAST_NS}


class _Clocks:
    """Between which bounds each clock is ahead of the root's, as far as calls lead to it.

    Attributes:
        fixed: hosts whose clocks are decided, and how far they are ahead.
    """

    def __init__(self, calls: _Calls) -> None:
        self._calls = calls
        self._bounds: dict[str, _Bounds] = {}
        self._looks = 0
        self.fixed: dict[str, float] = {}

    def is_known(self, host: str) -> bool:
        """Whether calls lead to it."""
        return host in self._bounds

    def nearest_to_right(self, host: str) -> float:
        """Within its bounds."""
        low, high = self._bounds[host]
        return min(max(0.0, low), high)

    def one_that_is_wrong(self) -> str | None:
        """A host that is not fixed and whose clock cannot be right.

        Raises:
            _Contradiction: there are too many.
        """
        self._look(len(self._bounds))
        return next(
            (
                host  # near the root first, as they were reached
                for host, (low, high) in self._bounds.items()
                if host not in self.fixed and not low <= 0 <= high
            ),
            None,
        )

    def fix(self, host: str, ahead: float) -> None:
        """Decide one, and what follows for the others.

        Raises:
            _Contradiction: no clock of another agrees with that.
        """
        self.fixed[host] = ahead
        self._bounds[host] = (ahead, ahead)
        waiting = deque([host])
        while waiting:
            one = waiting.popleft()
            low, high = self._bounds[one]
            for other, (least, most) in self._calls[one].items():
                self._look(1)
                was = self._bounds.get(other, (-inf, inf))
                now = max(was[0], low + least), min(was[1], high + most)
                if now[0] > now[1]:
                    raise _Contradiction
                if now != was:
                    self._bounds[other] = now
                    waiting.append(other)

    def _look(self, hosts: int) -> None:
        self._looks += hosts
        if self._looks > _MOST_LOOKS:
            raise _Contradiction


def on_one_clock(
    tree: Tree, events: Iterable[Event], ahead: Mapping[str, int]
) -> tuple[Tree, tuple[Event, ...]]:
    """A tree and events with the times that their hosts would have told with the root's clock."""
    if not ahead:
        return tree, tuple(events)
    return Tree(moved_span(span, ahead) for span in tree.spans), tuple(
        sorted((moved_event(event, ahead) for event in events), key=lambda event: event.time_ns)
    )


def moved_span(span: Span, ahead: Mapping[str, int]) -> Span:
    """The span with the times of the root's clock."""
    by = ahead.get(span.process.host, 0)
    return replace(span, start_ns=span.start_ns - by, end_ns=span.end_ns - by) if by else span


def moved_event(event: Event, ahead: Mapping[str, int]) -> Event:
    """As `moved_span`."""
    by = ahead.get(event.process.host, 0)
    return replace(event, time_ns=event.time_ns - by) if by else event


def _calls(tree: Tree) -> _Calls:
    """Of each host and each that it calls, or that calls it: how far the other may be ahead."""
    found: _Calls = {}
    for caller in tree.spans:
        for called in tree.children(caller.span_id):
            one, other = caller.process.host, called.process.host
            if one == other or not one or not other:
                continue
            least, most = found.setdefault(one, {}).get(other, (-inf, inf))
            # Nothing begins before it is called. What is sent off may outlive who sent it.
            if caller.has_start and called.has_start:
                most = min(most, called.start_ns - caller.start_ns)
            outlives = caller.kind == "producer" or called.kind == "consumer"
            if not outlives and caller.has_end and called.has_end:
                least = max(least, called.end_ns - caller.end_ns)
            found[one][other] = least, most
            found.setdefault(other, {})[one] = -most, -least
    for one, others in found.items():
        found[one] = {
            other: (low, high) for other, (low, high) in sorted(others.items()) if low <= high
        }
    return found
