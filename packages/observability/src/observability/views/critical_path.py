"""Which spans a step waited for: the path through its tree that fills the time of the root.

The usual backward walk. From the end of a span, the child that ended last is followed down; where
it began, the child that ended last before that moment comes next; time in between is the span's
own. A child that was still running at that moment is passed over: its end held up nobody there.
"""

from __future__ import annotations

from dataclasses import dataclass

from observability.records import Span
from observability.views.steps import Step


@dataclass(frozen=True)
class Segment:
    """A stretch of the critical path.

    Attributes:
        span: what went on.
        start_ns: nanoseconds since 1970, within the root.
        end_ns: as ``start_ns``.
    """

    span: Span
    start_ns: int
    end_ns: int

    @property
    def seconds(self) -> float:
        """How long it took."""
        return (self.end_ns - self.start_ns) / 1e9


def critical_path(step: Step) -> list[Segment]:
    """The segments of the critical path in time order.

    They tile the root's interval: each begins where the one before it ended. Children count only
    within their parents, so that clocks that disagree between hosts do no harm. Empty for a step
    without a root, or whose root took no time.
    """
    if step.root is None:
        return []
    found: list[Segment] = []
    # What is still to be walked, the latest on top: a span over an interval, or a gap of its own.
    waiting: list[tuple[Segment, bool]] = [
        (Segment(step.root, step.start_ns, step.end_ns), False),
    ]
    while waiting:
        part, own = waiting.pop()
        if part.start_ns >= part.end_ns:
            continue
        if own:
            found.append(part)
        else:
            waiting += reversed(_backwards(step, part))
    found.reverse()
    return found


def _backwards(step: Step, part: Segment) -> list[tuple[Segment, bool]]:
    """The children that a span waited for and the gaps between them, the latest first."""
    inside = [
        Segment(child, max(child.start_ns, part.start_ns), min(child.end_ns, part.end_ns))
        for child in step.children(part.span.span_id)
    ]
    # Of children that were cut to the same end, the one that really ended last held up the parent.
    # Of those that are alike in all that, any one, but the same one whatever order they came in.
    inside.sort(
        key=lambda one: (
            one.end_ns,
            one.span.end_ns,
            -one.start_ns,
            -one.span.start_ns,
            one.span.span_id,
        ),
        reverse=True,
    )
    found: list[tuple[Segment, bool]] = []
    moment = part.end_ns
    for child in inside:
        if child.start_ns < child.end_ns <= moment:
            found.append((Segment(part.span, child.end_ns, moment), True))
            found.append((child, False))
            moment = child.start_ns
    found.append((Segment(part.span, part.start_ns, moment), True))
    return found
