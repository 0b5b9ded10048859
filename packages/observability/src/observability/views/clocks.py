"""How far the clocks of hosts disagree, from what calls say of it, and times put right by that.

A call runs within its caller's span. Where it does not, and the two are on different hosts, one
clock is ahead of the other, by at least what sticks out. All calls between two hosts have to agree
on that; if they do not, some outlived their callers, and nothing can be said. Times are moved by
the least that puts every call within its caller: no clock is called wrong that may be right.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from observability.records import Event, Span
from observability.views.tree import Tree

LEAST_NS = 1_000_000
"""Clocks that disagree by less are left as they are: hosts that keep time by NTP do as well."""

_Bounds = tuple[float, float]
_ANYTHING: _Bounds = (float("-inf"), float("inf"))


def clocks_ahead(tree: Tree, root: Span | None) -> dict[str, int]:
    """The hosts whose clocks disagree with that of the root's host; without a root, none.

    Returns:
        Host to nanoseconds that its clock is at least ahead, negative of one that is behind.
    """
    calls = _calls(tree)
    if root is None or not calls:
        return {}
    known: dict[str, float] = {root.process.host: 0.0}
    while True:
        near = [other for (one, other) in calls if one in known and other not in known]
        if not near:
            break
        low, high = _ANYTHING
        for one, ahead in known.items():
            least, most = calls.get((one, near[0]), _ANYTHING)
            low, high = max(low, ahead + least), min(high, ahead + most)
        # As near to right as the calls allow; where they contradict each other it is left alone.
        known[near[0]] = min(max(0.0, low), high) if low <= high else 0.0
    return {host: int(ahead) for host, ahead in known.items() if abs(ahead) >= LEAST_NS}


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


def _calls(tree: Tree) -> dict[tuple[str, str], _Bounds]:
    """Of each pair of hosts, how far the second's clock can be ahead of the first's."""
    found: dict[tuple[str, str], _Bounds] = {}
    for caller in tree.spans:
        for called in tree.children(caller.span_id):
            one, other = caller.process.host, called.process.host
            if one == other or not one or not other:
                continue
            least, most = found.get((one, other), _ANYTHING)
            # Nothing begins before it is called. What is sent off may outlive who sent it.
            most = min(most, called.start_ns - caller.start_ns)
            if caller.kind != "producer" and called.kind != "consumer":
                least = max(least, called.end_ns - caller.end_ns)
            found[one, other] = least, most
            found[other, one] = -most, -least
    return found
