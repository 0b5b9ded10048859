"""Figures of a step: bytes per stage, slowest operations, wasted work."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from observability.records import Span
from observability.views import attributes
from observability.views.critical_path import Segment
from observability.views.processes import nanoseconds_in
from observability.views.steps import Step

NO_STAGE = "(no stage)"
"""Name that stands for the stage of the root and of spans that are not below it."""


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
        """Dropped samples as a fraction of the samples put, at most 1; 0 if none was put."""
        return min(1.0, self.dropped / self.put) if self.put else 0.0

    @property
    def seconds(self) -> float:
        """The wasted process-seconds: the share of dropped samples times the productive seconds."""
        return self.share * self.productive_seconds


def bytes_by_stage(step: Step) -> list[StageBytes]:
    """Return the bytes of each stage with puts or gets, in the order in which the stages began.

    Stages with the same name, such as the rollouts of several batches, are merged.
    """
    put_and_get: dict[str, list[int]] = {}
    starts_ns: dict[str, int] = {}
    for span in step.spans:
        direction = _direction(span)
        if direction is None:
            continue
        stage = step.stage(span.span_id)
        name, start_ns = (stage.name, stage.start_ns) if stage else (NO_STAGE, step.end_ns)
        put_and_get.setdefault(name, [0, 0])[direction] += attributes.count(
            span.attributes, "dataplane.bytes"
        )
        starts_ns[name] = min(start_ns, starts_ns.get(name, start_ns))
    names = sorted(put_and_get, key=lambda name: starts_ns[name])
    return [StageBytes(name, *put_and_get[name]) for name in names]


def slowest(step: Step, count: int = 10) -> list[Span]:
    """Return the ``count`` longest spans without children, longest first."""
    leaves = [span for span in step.spans if not step.children(span.span_id)]
    return heapq.nlargest(count, leaves, key=lambda span: span.end_ns - span.start_ns)


def waste(step: Step) -> Waste:
    """Return the wasted rollout work, from spans and the events ``put`` and ``dropped``."""
    rollout_spans = [
        span
        for span in step.spans
        if (stage := step.stage(span.span_id)) and stage.name == "rollout"
    ]
    return Waste(
        dropped=len(_samples(step, "dropped")),
        put=len(_samples(step, "put")),
        productive_seconds=nanoseconds_in("productive", step, rollout_spans) / 1e9,
    )


def longest_segments(
    path: Iterable[Segment], count: int = 20
) -> tuple[list[Segment], list[Segment]]:
    """Split a critical path into its ``count`` longest segments and the rest.

    Consecutive segments of one span are merged first. Both lists are in time order.
    """
    merged: list[Segment] = []
    for segment in path:
        if merged and merged[-1].span is segment.span and merged[-1].end_ns == segment.start_ns:
            merged[-1] = Segment(segment.span, merged[-1].start_ns, segment.end_ns)
        else:
            merged.append(segment)
    longest = heapq.nlargest(count, merged, key=lambda segment: segment.end_ns - segment.start_ns)
    longest_ids = {id(segment) for segment in longest}
    return (
        [segment for segment in merged if id(segment) in longest_ids],
        [segment for segment in merged if id(segment) not in longest_ids],
    )


def _direction(span: Span) -> int | None:
    """Return the index in ``put_and_get``: 0 for a put, 1 for a get; None for other spans."""
    if attributes.text(span.attributes, "messaging.operation.name") == "put":
        return 0
    return 1 if attributes.text(span.attributes, "db.operation.name") == "get" else None


def _samples(step: Step, event_name: str) -> set[tuple[str, str]]:
    """Return (partition, sample id) of every sample in the events called ``event_name``."""
    return {
        (attributes.text(event.attributes, "dataplane.partition"), sample_id)
        for event in step.events
        if event.name == event_name
        for sample_id in event.sample_ids
    }
