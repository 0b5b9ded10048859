"""Steps of runs, traces, and comparisons of traces."""

from __future__ import annotations

from typing import Literal

from dataplane_admin.models.base import Model, Text, Values


class StepRange(Model):
    """Consecutive steps of a run."""

    first_step: int
    """Smallest step number."""
    last_step: int
    steps: int
    start_ns: int | None
    """Start of the first step; None if not reported."""
    median_s: float
    """Duration of the median step; of an even number of steps, the shorter of the middle two."""
    max_s: float
    failed: int
    """Steps with a failed span."""
    median_trace: Text
    """Id of the trace of ``median_s``."""
    slowest_trace: Text
    """Id of the trace of ``max_s``."""


class RunSteps(Model):
    """Step durations over a run."""

    run_id: Text
    """Id of the run; empty if there is none."""
    steps: int
    """Number of finished steps; of a repeated step only the last counts."""
    older: bool
    """True if older steps are omitted."""
    ranges: list[StepRange]
    """Ranges in order of arrival; their numbers of steps differ by at most one."""


class TraceFacts(Model):
    """One trace in numbers."""

    trace_id: Text
    run_id: Text
    """Id of the run; empty if no span has one."""
    step: int | None
    name: Text
    """Name of its root, else of its first span."""
    start_ns: int | None
    """Start by the reporting process's clock; None if not reported. ``end_ns`` likewise."""
    end_ns: int | None
    received_ns: int
    """Time at which the service last received a span of it."""
    seconds: float
    has_root: bool
    """True if the finished root span was received."""
    spans: int
    errors: int
    """Failed spans."""
    processes: int
    service_names: tuple[Text, ...]
    """Names of its services, at most 16, sorted."""
    rejected: int
    """Spans that the service rejected as invalid or beyond its limits."""


class Traces(Model):
    """A page of traces, newest first by the receipt of their first span."""

    traces: list[TraceFacts]
    next: str | None
    """The cursor of the next page; None if this is the last."""


class SpanLink(Model):
    """A span to which another span links."""

    trace_id: Text
    span_id: Text


class SpanEvent(Model):
    """An event within a span, such as an exception."""

    name: Text
    time_s: float | None
    """Seconds since the trace's start; None if not reported."""
    attributes: Values


class SpanRow(Model):
    """One span of a waterfall; rows come parents first, siblings by start."""

    span_id: Text
    parent_id: Text | None
    depth: int
    """Depth in the tree; 0 at the root."""
    name: Text
    kind: Text
    """``internal``, ``server``, ``client``, ``producer``, ``consumer``, or ``unspecified``."""
    service: Text
    """``service.name`` of its process; ``unknown`` if not reported."""
    process: Text
    """Label of the process, as in the trace's ``process_times``."""
    start_s: float
    """Seconds since the trace's start; below 0 where clocks disagree."""
    seconds: float | None
    """Duration; None if start or end was not reported."""
    bucket: Text | None
    """``productive``, ``overhead``, ``idle``, ``wasted``; None for a span that only groups other
    spans."""
    outcome: Literal["unset", "ok", "error"]
    message: Text
    """Message of the failure."""
    attributes: Values
    links: list[SpanLink]
    events: list[SpanEvent]
    """Events in reported order, at most 32."""
    events_omitted: int
    scope: Text
    """The instrumentation scope, with its version; empty if not reported."""
    critical: bool
    """True if it is on the critical path."""


class Segment(Model):
    """A stretch of the critical path."""

    span_id: Text
    name: Text
    process: Text
    start_s: float
    seconds: float


class ProcessTime(Model):
    """Times of one process within the trace."""

    process: Text
    busy: list[tuple[float, float]]
    """Busy intervals: start and end in seconds since the trace's start, in order."""
    seconds: dict[Text, float]
    """Bucket to seconds; each moment counts once."""
    busy_s: float | None
    """Busy seconds; None if no span of the process has ``rl.bucket``."""
    busy_elsewhere: list[tuple[float, float]]
    """Further intervals in which it was busy in other traces of the run, as ``busy``."""
    elsewhere_s: float
    """Seconds of ``busy_elsewhere``; a lower bound if the trace has ``others_omitted``."""
    bubble_s: float | None
    """Remaining seconds of the trace; None if ``busy_s`` is None, or if the trace has
    ``others_omitted``."""
    resource: Values
    """Resource attributes of the process."""


class TraceEvent(Model):
    """One lifecycle event within a trace."""

    name: Text
    time_s: float
    """Seconds since the trace's start."""
    process: Text
    span_id: Text
    run_id: Text
    """Id of the run; empty if unknown."""
    partition: Text
    task: Text
    samples: int
    examples: list[Text]
    """Ids of some of its samples."""


class TraceLog(Model):
    """One log record within a trace, other than lifecycle events."""

    time_s: float | None
    """Seconds since the trace's start; None if not reported."""
    process: Text
    span_id: Text
    """Id of the span; empty if the record names only the trace."""
    severity: Text
    """``TRACE``, ``DEBUG``, ``INFO``, ``WARN``, ``ERROR``, ``FATAL``, or as reported."""
    name: Text
    """Name of the event, empty without one."""
    body: Text
    """Text of the record; empty without one, or if text that may quote samples is not stored."""
    scope: Text
    """The logger, with its version; empty if not reported."""
    attributes: Values


class SpanGroup(Model):
    """The spans of a trace with the same service, name and kind."""

    service: Text
    name: Text
    kind: Text
    count: int
    errors: int
    """Failed spans."""
    total_s: float
    """Sum of the durations."""
    self_s: float
    """Sum of the self times: each span without the time in which any of its children ran."""
    p50_s: float | None
    """Median duration, of an even number the shorter of the middle two; None if no span reported
    both start and end. ``p95_s`` and ``max_s`` likewise."""
    p95_s: float | None
    max_s: float | None
    active_s: float
    """Time within the trace in which at least one of the spans ran."""


class SpanPath(Model):
    """The spans of a trace with the same services and names from the root down to them."""

    service: Text
    name: Text
    depth: int
    """Depth in the tree; 0 at the root. The parent is the nearest row above with a smaller
    depth."""
    count: int
    errors: int
    total_s: float
    """Sum of the durations; concurrent spans may exceed their parent."""
    self_s: float
    """Sum of the self times, see `SpanGroup`."""


class ServiceSpans(Model):
    """The spans of a service within a trace."""

    service: Text
    spans: int
    errors: int


class ModelCalls(Model):
    """Calls of a model within a trace: spans with ``gen_ai.*`` attributes."""

    service: Text
    operation: Text
    """``gen_ai.operation.name``, else the name of the span."""
    provider: Text
    """``gen_ai.provider.name`` or ``gen_ai.system``; may be empty."""
    model: Text
    """Requested model, else that of the response; may be empty."""
    calls: int
    errors: int
    input_tokens: int | None
    """Input tokens; None if no call reported any. ``output_tokens`` likewise."""
    output_tokens: int | None
    p50_s: float | None
    """Median latency: as reported by vLLM, else the span's duration. ``p95_s`` likewise."""
    p95_s: float | None
    first_token_p50_s: float | None
    """Median time to the first token; None if not reported."""
    tokens_per_s: float | None
    """Output tokens per second of latency, over the calls that report both."""
    finish_reasons: dict[Text, int]
    """Finish reason to number of responses, most frequent first."""


class StageBytes(Model):
    """Bytes that a stage moved through the data plane."""

    stage: Text
    put: int
    get: int


class TraceStaleness(Model):
    """Versions between generation and training of the samples that a step trained on."""

    minimum: int | None
    """Minimum; None if no version is known. ``mean`` and ``maximum`` likewise."""
    mean: float | None
    maximum: int | None
    samples: int
    """Trained samples with both versions known."""
    unknown: int
    """Trained samples with an unknown version."""


class ExternalLink(Model):
    """The same trace in another tool."""

    name: str
    """``Jaeger`` or ``Tempo``."""
    url: str


class Trace(TraceFacts):
    """One trace across all its processes."""

    incomplete: list[Text]
    """Reasons why it is incomplete, a sentence each; empty if complete."""
    clocks: list[Text]
    """Hosts whose clocks disagree, a sentence each; their times are corrected."""
    rows: list[SpanRow]
    """All spans; of a very large trace the longest ones."""
    rows_omitted: int
    """Spans that are not among ``rows``."""
    critical_path: list[Segment]
    """Segments in time order that tile the root; empty without a root."""
    process_times: list[ProcessTime]
    """Times by process, the root's process first."""
    others_omitted: bool
    """True if too many traces of the run overlap with this one to read them all."""
    buckets: dict[Text, float]
    """Bucket to process-seconds, over all processes; empty if no span has a bucket."""
    links_out: list[Text]
    """Traces that it links to."""
    links_in: list[Text]
    """Traces that link to it."""
    events: list[TraceEvent]
    """Events, at most 500."""
    events_omitted: int
    logs: list[TraceLog]
    """Log records by time."""
    logs_full: bool
    """True if the limit of stored log records is reached, so that later ones are missing."""
    services: list[ServiceSpans]
    """Services by number of spans, at most 100."""
    services_omitted: int
    names: list[SpanGroup]
    """Statistics by name, largest total first, at most 500."""
    names_omitted: int
    paths: list[SpanPath]
    """Statistics by path, parents first, at most 1,000 and 48 deep."""
    paths_omitted: int
    """Spans whose path is not among ``paths``."""
    model_calls: list[ModelCalls]
    """Calls of models, most calls first, at most 100."""
    stages: list[StageBytes]
    staleness: TraceStaleness | None
    """Staleness of the trained samples; None without any."""
    external: list[ExternalLink]


class ComparedRow(Model):
    """Spans of two traces with the same path of names from the root."""

    name: Text
    depth: int
    a_count: int
    b_count: int
    a_s: float
    """Total seconds."""
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
    """Busy seconds of a process in two traces."""

    process: Text
    a_busy_s: float
    b_busy_s: float
    difference_s: float


class TraceComparison(Model):
    """Two traces side by side."""

    a: TraceFacts
    b: TraceFacts
    rows: list[ComparedRow]
    """Rows, parents first, at most 500."""
    rows_omitted: int
    buckets: list[ComparedBucket]
    processes: list[ComparedProcess]
    """Busy seconds by process, the root's process first."""
    critical: list[ComparedRow]
    """Seconds on the critical path by span name, largest difference first."""
    notes: list[Text]
    """Limits of the comparison, a sentence each."""
