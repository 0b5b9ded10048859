"""The figures of a step: bytes per stage, slowest operations, wasted work."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from observability.records import Span
from observability.views import attributes
from observability.views.critical_path import Segment
from observability.views.processes import busy_ns
from observability.views.steps import Step

NO_STAGE = "(no stage)"
"""The stage of spans whose ancestors do not reach the root."""


@dataclass(frozen=True)
class StageBytes:
    """The bytes that a stage moved through the data plane.

    Attributes:
        stage: name of the stage.
        put: bytes written.
        get: bytes read.
    """

    stage: str
    put: int
    get: int


@dataclass(frozen=True)
class Waste:
    """The rollout work of a step on samples that were dropped.

    Attributes:
        dropped: number of samples dropped in the step.
        put: number of samples put in the step.
        productive_seconds: productive process-seconds of the step's rollouts.
    """

    dropped: int
    put: int
    productive_seconds: float

    @property
    def share(self) -> float:
        """The ratio of dropped to put samples, up to 1; 0 if nothing was put."""
        return min(1.0, self.dropped / self.put) if self.put else 0.0

    @property
    def seconds(self) -> float:
        """The wasted process-seconds: the share times the productive seconds."""
        return self.share * self.productive_seconds


def bytes_by_stage(step: Step) -> list[StageBytes]:
    """Return the bytes of each stage that moved any, in the order in which the stages began.

    Stages with the same name (rollouts of several batches) are merged.
    """
    moved: dict[str, list[int]] = {}
    began: dict[str, int] = {}
    for span in step.spans:
        direction = _direction(span)
        if direction is None:
            continue
        stage = step.stage(span.span_id)
        name, start = (stage.name, stage.start_ns) if stage else (NO_STAGE, step.end_ns)
        moved.setdefault(name, [0, 0])[direction] += attributes.count(
            span.attributes, "dataplane.bytes"
        )
        began[name] = min(start, began.get(name, start))
    return [StageBytes(name, *moved[name]) for name in sorted(moved, key=lambda each: began[each])]


def slowest(step: Step, count: int = 10) -> list[Span]:
    """Return the ``count`` longest operations, longest first: spans without children."""
    leaves = [span for span in step.spans if not step.children(span.span_id)]
    return heapq.nlargest(count, leaves, key=lambda span: span.end_ns - span.start_ns)


def waste(step: Step) -> Waste:
    """Return the wasted rollout work, from the events ``put`` and ``dropped``."""
    stages = {
        span.span_id
        for span in step.spans
        if span.name == "rollout" and step.stage(span.span_id) is span
    }
    rollouts = [
        span
        for span in step.spans
        if (stage := step.stage(span.span_id)) and stage.span_id in stages
    ]
    productive = sum(
        busy_ns(step, rollouts, process, buckets={"productive"}) for process in step.processes
    )
    return Waste(
        dropped=len(_samples(step, "dropped")),
        put=len(_samples(step, "put")),
        productive_seconds=productive / 1e9,
    )


def condensed(path: Iterable[Segment], count: int = 20) -> tuple[list[Segment], list[Segment]]:
    """Split a critical path into its ``count`` longest segments, in time order, and the rest.

    Consecutive segments of one span are merged first.
    """
    merged: list[Segment] = []
    for segment in path:
        if merged and merged[-1].span is segment.span and merged[-1].end_ns == segment.start_ns:
            merged[-1] = Segment(segment.span, merged[-1].start_ns, segment.end_ns)
        else:
            merged.append(segment)
    longest = heapq.nlargest(count, merged, key=lambda segment: segment.end_ns - segment.start_ns)
    shown = {id(segment) for segment in longest}
    return (
        [segment for segment in merged if id(segment) in shown],
        [segment for segment in merged if id(segment) not in shown],
    )


def _direction(span: Span) -> int | None:
    """Return 0 for a put, 1 for a get, None for any other span."""
    if attributes.text(span.attributes, "messaging.operation.name") == "put":
        return 0
    return 1 if attributes.text(span.attributes, "db.operation.name") == "get" else None


def _samples(step: Step, event_name: str) -> set[tuple[str, str]]:
    return {
        (attributes.text(event.attributes, "dataplane.partition"), sample_id)
        for event in step.events
        if event.name == event_name
        for sample_id in event.sample_ids
    }
