"""The critical path of a step: the path through its tree that fills the time of the root.

The walk goes backwards. From the end of a span it follows the child that ended last. From the start
of that child it continues with the child that ended last before that moment. The time in between
belongs to the span. A child that was still running at that moment is skipped: its end delayed
nothing there.
"""

from __future__ import annotations

from dataclasses import dataclass

from observability.records import Span
from observability.views.steps import Step


@dataclass(frozen=True)
class Segment:
    """A segment of the critical path.

    Attributes:
        span: the span that ran.
        start_ns: nanoseconds since 1970, within the root.
        end_ns: as ``start_ns``.
    """

    span: Span
    start_ns: int
    end_ns: int

    @property
    def seconds(self) -> float:
        """The duration in seconds."""
        return (self.end_ns - self.start_ns) / 1e9


def critical_path(step: Step) -> list[Segment]:
    """Return the segments of the critical path in time order.

    They tile the root's interval: each begins where the previous one ended. Children are clipped to
    their parents, so clocks that disagree between hosts do no harm. The path is empty if the step
    has no root or the root has no duration.
    """
    if step.root is None:
        return []
    segments: list[Segment] = []
    # Parts still to walk, latest on top; the flag marks the span's own time between children.
    waiting: list[tuple[Segment, bool]] = [
        (Segment(step.root, step.start_ns, step.end_ns), False),
    ]
    while waiting:
        part, own = waiting.pop()
        if part.start_ns >= part.end_ns:
            continue
        if own:
            segments.append(part)
        else:
            waiting += reversed(_backwards(step, part))
    segments.reverse()
    return segments


def _backwards(step: Step, part: Segment) -> list[tuple[Segment, bool]]:
    """Return the children that delayed a span and the gaps between them, latest first."""
    inside = [
        Segment(child, max(child.start_ns, part.start_ns), min(child.end_ns, part.end_ns))
        for child in step.children(part.span.span_id)
    ]
    # Of children clipped to the same end, the one whose span ended last delayed the parent. The id
    # makes the order independent of the order of arrival.
    inside.sort(
        key=lambda child: (
            child.end_ns,
            child.span.end_ns,
            -child.start_ns,
            -child.span.start_ns,
            child.span.span_id,
        ),
        reverse=True,
    )
    parts: list[tuple[Segment, bool]] = []
    moment = part.end_ns
    for child in inside:
        if child.start_ns < child.end_ns <= moment:
            parts.append((Segment(part.span, child.end_ns, moment), True))
            parts.append((child, False))
            moment = child.start_ns
    parts.append((Segment(part.span, part.start_ns, moment), True))
    return parts
