"""The critical path of a step: the span that, at each moment, determined when the root ended.

The path is derived backwards. From the end of a span it enters the child that ended last. From the
start of that child it continues with the child that ended last before that moment. The time between
two such children belongs to the span itself. A child that was still running at that moment is
skipped, because its end did not delay what followed:

    span     [---------------------------------------]
    a              [-------]
    b                      [----------]                  skipped: it was running when c started
    c                             [-----------]
    path     | span|   a   | span |     c     | span |
"""

from __future__ import annotations

from dataclasses import dataclass

from observability.records import Span
from observability.views.steps import Step


@dataclass(frozen=True)
class Segment:
    """A segment of the critical path: an interval of a span.

    Attributes:
        span: the span.
        start_ns: start of the interval in nanoseconds since 1970, within the root.
        end_ns: end of the interval in nanoseconds since 1970, within the root.
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

    Each segment begins where the previous one ended, and together they cover the root. Children are
    clipped to their parents, so the path is valid even if clocks disagree. It is empty if the step
    has no root or the root has no duration.
    """
    if step.root is None:
        return []
    segments: list[Segment] = []
    # A stack of intervals, the latest on top. A final interval is a segment of the path. Other
    # intervals must still be divided among their span and its children.
    pending: list[tuple[Segment, bool]] = [
        (Segment(step.root, step.start_ns, step.end_ns), False),
    ]
    while pending:
        segment, is_final = pending.pop()
        if segment.start_ns >= segment.end_ns:
            continue
        if is_final:
            segments.append(segment)
        else:
            pending += reversed(_divide(step, segment))
    segments.reverse()
    return segments


def _divide(step: Step, segment: Segment) -> list[tuple[Segment, bool]]:
    """Divide an interval of a span among the span and the children on the critical path.

    Returns:
        Intervals, latest first, each with a flag: True for the span itself, False for a child.
    """
    children = [
        Segment(child, max(child.start_ns, segment.start_ns), min(child.end_ns, segment.end_ns))
        for child in step.children(segment.span.span_id)
    ]
    # Of children clipped to the same end, the one whose span ended last delayed the parent. The id
    # makes the order independent of the order of arrival.
    children.sort(
        key=lambda child: (
            child.end_ns,
            child.span.end_ns,
            -child.start_ns,
            -child.span.start_ns,
            child.span.span_id,
        ),
        reverse=True,
    )
    intervals: list[tuple[Segment, bool]] = []
    moment = segment.end_ns
    for child in children:
        if child.start_ns < child.end_ns <= moment:
            intervals.append((Segment(segment.span, child.end_ns, moment), True))
            intervals.append((child, False))
            moment = child.start_ns
    intervals.append((Segment(segment.span, segment.start_ns, moment), True))
    return intervals
