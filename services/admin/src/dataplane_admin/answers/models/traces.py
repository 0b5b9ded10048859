"""Traces, and two of them side by side."""

from __future__ import annotations

from typing import Literal

from dataplane_admin.answers.models.base import Model, Text, Values


class Run(Model):
    """One run of training."""

    run_id: Text
    first_ns: int
    last_ns: int
    steps: int


class Runs(Model):
    """Every run, the newest first."""

    runs: list[Run]


class StepRange(Model):
    """Steps of a run that came one after the other."""

    first_step: int
    """The smallest number among them."""
    last_step: int
    steps: int
    start_ns: int | None
    """Of the first of them; None if it was not reported."""
    median_s: float
    """Of the step in the middle by length, which there is: not a mean of two."""
    most_s: float
    failed: int
    """Steps with a span that failed."""
    typical: Text
    """The trace that took ``median_s``."""
    slowest: Text
    """The trace that took ``most_s``."""


class RunSteps(Model):
    """How long the steps of a run took, from its beginning to now."""

    run_id: Text
    """Empty if no run has told anything."""
    steps: int
    """That have ended and are counted, each once: one that was done again as it was done last."""
    older: bool
    """Whether there were more before them."""
    ranges: list[StepRange]
    """In the order in which they began, of as many steps each, give or take one."""


class TraceFacts(Model):
    """One trace in numbers."""

    trace_id: Text
    run_id: Text
    """Empty if no span told."""
    step: int | None
    name: Text
    """Of its root, or else of its first span."""
    start_ns: int | None
    """By the clock of whoever reported it; None if nobody did. As ``end_ns``."""
    end_ns: int | None
    received_ns: int
    """When the service last received something of it, by its own clock."""
    seconds: float
    has_root: bool
    """Whether the span of the whole has arrived, with its end."""
    spans: int
    errors: int
    """Spans that failed."""
    processes: int
    rejected: int
    """Spans that the service's limits refused."""


class Traces(Model):
    """A page of traces, the one that the service received first is the last."""

    traces: list[TraceFacts]
    next: str | None
    """The cursor of the next page; None if this is the last."""


class SpanLink(Model):
    """A span that another one is about."""

    trace_id: Text
    span_id: Text


class SpanEvent(Model):
    """Something that happened within a span: an exception, for example."""

    name: Text
    time_s: float | None
    """Since the trace's start; None if not reported."""
    attributes: Values


class SpanRow(Model):
    """One span of a waterfall; rows come parents first, siblings by start."""

    span_id: Text
    parent_id: Text | None
    depth: int
    """0 at the top."""
    name: Text
    kind: Text
    process: Text
    """Label of the process, one of the trace's ``processes``."""
    start_s: float
    """Since the trace's start; below 0 where clocks disagree."""
    seconds: float | None
    """None if its start or its end was not reported."""
    bucket: Text | None
    """``productive``, ``overhead``, ``idle``, ``wasted``; None if it only groups others."""
    outcome: Literal["unset", "ok", "error"]
    message: Text
    """Why it failed."""
    attributes: Values
    links: list[SpanLink]
    events: list[SpanEvent]
    """At most 32, in the order reported."""
    events_left_out: int
    scope: Text
    """The instrumentation that made it, with its version; empty if not reported."""
    critical: bool
    """Whether the critical path goes through it."""


class Segment(Model):
    """A stretch of the critical path."""

    span_id: Text
    name: Text
    process: Text
    start_s: float
    seconds: float


class ProcessTime(Model):
    """How a process spent the trace."""

    process: Text
    busy: list[tuple[float, float]]
    """When it worked: begin and end in seconds since the trace's start, in order."""
    seconds: dict[Text, float]
    """Bucket to seconds; each moment counts once."""
    busy_s: float | None
    """None if no span of the process says by ``rl.bucket`` whether it worked."""
    bubble_s: float | None
    """The rest of the trace; None as ``busy_s``."""
    resource: Values
    """Attributes that the process reported of itself."""


class TraceEvent(Model):
    """One lifecycle event within a trace."""

    name: Text
    time_s: float
    """Since the trace's start."""
    process: Text
    span_id: Text
    partition: Text
    task: Text
    samples: int
    examples: list[Text]
    """Ids of some of its samples."""


class StageBytes(Model):
    """What a stage moved through the data plane, in bytes."""

    stage: Text
    put: int
    get: int


class TraceStaleness(Model):
    """Versions between generation and training of the samples that a step trained on."""

    least: int | None
    """None if no version is known; as ``mean`` and ``most``."""
    mean: float | None
    most: int | None
    samples: int
    """Trained samples of which both versions are known."""
    unknown: int
    """Trained samples of which one is not."""


class ExternalLink(Model):
    """The same trace in another tool."""

    name: str
    """``Jaeger`` or ``Tempo``."""
    url: str


class Trace(TraceFacts):
    """One trace across all its processes."""

    incomplete: list[Text]
    """Why it is not whole, a sentence each; empty if nothing is amiss."""
    clocks: list[Text]
    """Which hosts' clocks disagree, a sentence each; their times are put right by that."""
    rows: list[SpanRow]
    """Every span; of a very large trace the longest ones."""
    rows_left_out: int
    """Spans that are not among ``rows``."""
    critical_path: list[Segment]
    """In time order; tiles the root. Empty without one."""
    process_times: list[ProcessTime]
    """That of the root first."""
    buckets: dict[Text, float]
    """Bucket to process-seconds, over all processes; empty if no span has a bucket."""
    links_out: list[Text]
    """Traces that it links to."""
    links_in: list[Text]
    """Traces that link to it."""
    events: list[TraceEvent]
    """At most 500."""
    events_left_out: int
    stages: list[StageBytes]
    staleness: TraceStaleness | None
    """None if nothing was trained on."""
    external: list[ExternalLink]


class ComparedRow(Model):
    """Spans of two traces that stand at the same place: same names down from the root."""

    name: Text
    depth: int
    a_count: int
    b_count: int
    a_s: float
    """Seconds of all of them together."""
    b_s: float
    difference_s: float
    """``b_s - a_s``."""


class ComparedBucket(Model):
    """Process-seconds of two traces in one bucket."""

    bucket: Text
    a_s: float
    b_s: float
    difference_s: float


class ComparedProcess(Model):
    """Seconds in which a process worked, in two traces."""

    process: Text
    a_busy_s: float
    b_busy_s: float
    difference_s: float


class TraceComparison(Model):
    """Two traces side by side."""

    a: TraceFacts
    b: TraceFacts
    rows: list[ComparedRow]
    """Parents first; at most 500."""
    rows_left_out: int
    buckets: list[ComparedBucket]
    processes: list[ComparedProcess]
    """That of the root first."""
    critical: list[ComparedRow]
    """Seconds on the critical path by span name, the largest difference first."""
    notes: list[Text]
    """What stands in the way of comparing, a sentence each."""
