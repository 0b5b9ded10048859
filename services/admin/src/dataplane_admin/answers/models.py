"""Every answer of the service, for the API, the pages and the commands alike.

Moments are whole nanoseconds since 1970 and are named ``*_ns``; durations are seconds and are named
``*_s`` or ``seconds``. A field is None where nobody told it, never 0 in its place. Names and ids are
as their owners chose them: whoever shows them has to make them harmless.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal  # Any: values of attributes and tags

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def whole_text(value: object) -> object:
    """``value``; in a text, surrogates without their other half are written as escapes.

    UTF-8, and so JSON on the wire, has no form for them, yet a sample id may hold one.
    """
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    return value


def whole_texts(value: object) -> object:
    """`whole_text` of every text in what an attribute or a tag may hold."""
    if isinstance(value, dict):
        return {whole_text(str(name)): whole_texts(held) for name, held in value.items()}
    if isinstance(value, list | tuple):
        return [whole_texts(held) for held in value]
    if value is None or isinstance(value, str | bool | float):
        return whole_text(value)
    if isinstance(value, int):
        # Larger ones are not numbers to the readers of JSON that matter, a browser above all.
        return value if abs(value) < 2**63 else str(value)
    return whole_text(str(value))


Text = Annotated[str, BeforeValidator(whole_text)]
Values = Annotated[dict[str, Any], BeforeValidator(whole_texts)]


class Model(BaseModel):
    """What all answers are: they do not change, and their fields are all there are."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


# --- status ---------------------------------------------------------------------------------------


class LiveStatus(Model):
    """How the service stands with the data plane it looks into."""

    asked: bool
    """Whether the service was told to look into a data plane at all."""
    attached: bool
    """Whether the newest attempt to read it succeeded."""
    source: Text
    """What is looked into, ``Ray at 10.0.0.1:6379`` for example; empty if nothing is."""
    error: Text | None
    """One sentence: why the newest attempt failed; None if it did not."""
    at_ns: int | None
    """When the snapshot that is shown was taken; None if there is none yet."""
    age_s: float | None
    """Seconds since then."""
    revision: int
    """Grows when something that is shown has changed."""


class StoreStatus(Model):
    """What the service has taken in, and how much of it is still there."""

    writable: bool
    """Whether what arrives can be kept."""
    error: Text | None
    """One sentence: why it cannot; None if it can."""
    revision: int
    """Grows with every change."""
    traces: int
    """Traces that are kept."""
    spans: int
    """Spans that are kept."""
    events: int
    """Lifecycle events that are kept."""
    samples: int
    """Distinct samples that the kept events name."""
    nbytes: int
    """Bytes on disk."""
    oldest_ns: int | None
    """The oldest trace or event that is kept; None if there is none."""


class TelemetryStatus(Model):
    """What became of the telemetry sent to the service since it was started."""

    ingested: dict[Text, int]
    """``spans`` and ``events`` that were new."""
    repeated: int
    """Spans and events that were there already: exporters sent them again."""
    refused: int
    """Spans, log records and data points that were kept out, which their senders were told of."""
    ignored: int
    """Log records that are no lifecycle events."""


class Status(Model):
    """The service in one look."""

    name: str
    """Always ``dataplane-admin``."""
    version: str
    """Of the distribution."""
    now_ns: int
    """The service's clock."""
    started_ns: int
    """When this process began."""
    live: LiveStatus
    store: StoreStatus
    telemetry: TelemetryStatus
    actions: bool
    """Whether actions are allowed."""
    subscribers: int
    """Connections that wait for live updates."""


# --- partitions -----------------------------------------------------------------------------------


class Claim(Model):
    """A leased claim: samples that one process holds for one task."""

    claim: Text
    """Names the lease; it is not the lease's token, and gives no right to it."""
    task: Text
    """The task that claimed."""
    owner: Text
    """Who claimed: ``host:pid`` of the process; empty if it did not tell."""
    samples: int
    """Samples it still holds."""
    age_s: float
    """Seconds since the claim."""
    expires_in_s: float | None
    """Seconds until the lease runs out, below 0 if it has; None if it never does."""


class PartitionField(Model):
    """One field of a partition."""

    name: Text
    kind: Text | None
    """What its values are; None until one is written."""
    declared: bool
    """Whether the partition was registered with it."""
    written: int
    """Samples that have it, of those that are there."""
    nbytes: int | None
    """Bytes that the store holds of it; None where the store cannot tell."""


class PartitionTask(Model):
    """One task of a partition. ``unclaimed + leased + settled`` is what is there."""

    name: Text
    unclaimed: int
    """Samples that it can still claim, complete or not."""
    leased: int
    """Samples that it has claimed and not acknowledged."""
    settled: int
    """Samples that never return to it: acknowledged, or claimed where there are no leases."""
    leases: int
    """Claims that hold the leased samples."""
    needs: list[Text] | None
    """The fields that its newest claim asked for; None if no event told."""
    ready: int | None
    """Unclaimed samples that have all of ``needs``, as of the partition's last scan; None while
    ``needs`` or the scan is missing."""
    oldest_unclaimed_s: float | None
    """Age of the oldest sample that it has not claimed; None if there is none."""
    oldest_claim: Claim | None
    """Its oldest claim that is neither settled nor released."""
    claimed_per_s: float | None
    """Samples it claimed a second, over the time of ``trend``; None until two polls are there."""
    settled_per_s: float | None
    """Samples it settled a second."""
    backlog_per_s: float | None
    """By how many a second ``unclaimed`` grows; below 0 while the task catches up."""
    backlog: list[int]
    """``unclaimed`` at each moment of the partition's ``polled_ns``."""


class Partition(Model):
    """One partition of the live data plane."""

    id: Text
    declared: int
    """Samples that it was registered for."""
    put: int
    """Samples put since then."""
    present: int
    """Samples that are there now."""
    outstanding: int
    """Declared samples that are still to be put."""
    reserved: int
    """Samples of puts that are under way."""
    cleared: int
    """Samples that were put and are gone."""
    group_size: int | None
    """Samples per prompt that are claimed together; None if they are not."""
    nbytes: int | None
    """Bytes that the store holds of it; None where it cannot tell."""
    revision: int
    """Grows with every change of the partition."""
    fields: list[PartitionField]
    tasks: list[PartitionTask]
    enums: dict[Text, list[Text]]
    """Fields with a fixed vocabulary."""
    put_per_s: float | None
    """Samples put a second over the time of the trend; None until two polls are there."""
    polled_ns: list[int]
    """When the partition was read, oldest first: at most the last 120 times."""
    put_trend: list[int]
    """``put`` at each of those moments."""


class Unit(Model):
    """One storage unit of the live data plane, in bytes."""

    name: Text
    node: Text
    capacity: int
    used: int
    free: int


class Partitions(Model):
    """All partitions, as of one moment."""

    partitions: list[Partition]
    storage: list[Unit]
    """Empty if the backend tells of none."""
    totals: dict[Text, int]
    """What happened in the store since it was made: ``samples_put``, ``leases_expired``, ..."""
    live: LiveStatus


class Window(Model):
    """A stretch of consecutive samples of a partition."""

    start: int
    """Place of its first sample, in the order of first puts."""
    count: int
    """Samples in it."""
    written: list[float]
    """Of each of the matrix's fields the share of samples that have it, 0 to 1."""
    tasks: list[list[float]]
    """Of each of the matrix's tasks the shares of samples that are unclaimed, assigned to a rank,
    leased and settled; they add up to 1."""


class Matrix(Model):
    """The samples of a partition by field and task, aggregated."""

    partition: Text
    total: int
    """Samples that were there when it was scanned."""
    scanned: int
    """Of those, how many the windows cover; fewer only beyond a million."""
    at_ns: int | None
    """When it was scanned; None if it has not been yet. It then has no windows."""
    fields: list[Text]
    tasks: list[Text]
    windows: list[Window]


class Sample(Model):
    """One sample as the live data plane has it."""

    sample_id: Text
    partition: Text
    fields: list[Text]
    """The fields that are written."""
    tags: Values
    tasks: dict[Text, Text]
    """Task to ``unclaimed``, ``assigned``, ``leased`` or ``settled``."""
    claims: dict[Text, Text]
    """Task to the claim that holds it."""
    origins: dict[Text, Text]
    """Field to the put that wrote it, a traceparent for example."""
    age_s: float | None
    """Seconds since its first put; None where the store does not tell."""


class SamplePage(Model):
    """Consecutive samples of a partition, in the order of first puts."""

    partition: Text
    start: int
    total: int
    """Samples in the partition."""
    samples: list[Sample]


# --- lineage --------------------------------------------------------------------------------------


class SampleHit(Model):
    """A sample that was found."""

    sample_id: Text
    partition: Text
    run_id: Text
    """Empty if no event told."""
    weight_version: int | None
    """Of the weights it was generated with."""
    first_ns: int | None
    """Its first event; None if it is only known live."""
    last_ns: int | None
    """Its last event."""
    live: bool
    """Whether it was found in the live data plane; a search by id that the history answered does
    not ask."""


class SampleHits(Model):
    """Samples by the beginning of their id, or by a tag."""

    samples: list[SampleHit]
    next: str | None
    """The cursor of the next page; None if this is the last."""
    notes: list[Text]
    """Sentences about what could not be searched."""


class Hop(Model):
    """One thing that happened to a sample."""

    time_ns: int
    """By the clock of its process."""
    seconds: float
    """Since the sample's first hop."""
    name: Text
    """The event: ``put``, ``claimed``, ``read``, ``trained``, ``acknowledged``, ``cleared``, ..."""
    process: Text
    partition: Text
    task: Text
    """Of a claim, a settlement or training; else empty."""
    stage: Text
    """The step's stage during which it happened; empty if not known."""
    fields: list[Text]
    nbytes: float | None
    """The sample's even share of the batch."""
    batch: int
    """Samples of the whole batch."""
    weight_version: int | None
    run_id: Text
    step: int | None
    trace_id: Text
    """Of its trace; empty if there is none."""
    span_id: Text
    detail: Text
    """What else the event tells: the reason of a drop, the wait of a claim."""
    whole_partition: bool
    """The whole partition was cleared, not this sample by name."""


class SampleLife(Model):
    """One sample from its put to its clear."""

    sample_id: Text
    partition: Text | None
    """The partition that was asked for; None if it was left open."""
    hops: list[Hop]
    """In the order of the times told; empty if no event names it."""
    live: Sample | None
    """As the live data plane has it now; None if it has not, or was not asked."""
    notes: list[Text]
    """Sentences about what could not be looked up."""


class Lack(Model):
    """Samples that lack a field."""

    count: int
    examples: list[Text]
    """Ids of some, in the order of first puts."""


class Wait(Model):
    """One reason why a run stands still."""

    kind: Literal["wait", "backlog", "claim"]
    """``wait``: a claim or call without an answer. ``backlog``: a task has not claimed what has long
    been there. ``claim``: a claim that nobody has settled for long."""
    sentence: Text
    """All of it in one sentence with numbers."""
    task: Text
    """Empty for a call."""
    process: Text
    """Who waits, or holds; empty if not known."""
    partition: Text
    """Empty if the wait is about none."""
    run_id: Text
    step: int | None
    since_ns: int
    seconds: float
    asked: int
    """Samples asked for; 0 if not told."""
    ready: int
    there: int
    lacks: dict[Text, Lack]
    """Field to the samples that lack it."""
    blocking: list[Text]
    """Ids of samples that are waited for, or that stand there."""
    claim: Text
    """The claim, of kind ``claim``; else empty."""


class Staleness(Model):
    """How old the weights were that training's samples were generated with."""

    run_id: Text
    """The run that was counted; empty if nothing has been trained."""
    steps: int
    """Over how many of its last steps."""
    counts: dict[int, int]
    """Versions between generation and training to samples."""
    mean: float | None
    """Versions; None if none are known."""
    unknown: int
    """Trained samples of which a version is not known."""


# --- traces ---------------------------------------------------------------------------------------


class Run(Model):
    """One run of training."""

    run_id: Text
    first_ns: int
    last_ns: int
    steps: int


class Runs(Model):
    """Every run, the newest first."""

    runs: list[Run]


class TraceFacts(Model):
    """One trace in numbers."""

    trace_id: Text
    run_id: Text
    """Empty if no span told."""
    step: int | None
    name: Text
    """Of its root, or else of its first span."""
    start_ns: int
    end_ns: int
    seconds: float
    has_root: bool
    """Whether the span of the whole has arrived."""
    spans: int
    errors: int
    """Spans that failed."""
    processes: int
    rejected: int
    """Spans that the service's limits refused."""


class Traces(Model):
    """A page of traces, the newest first."""

    traces: list[TraceFacts]
    next: str | None
    """The cursor of the next page; None if this is the last."""


class SpanLink(Model):
    """A span that another one is about."""

    trace_id: Text
    span_id: Text


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
    seconds: float
    bucket: Text | None
    """``productive``, ``overhead``, ``idle``, ``wasted``; None if it only groups others."""
    outcome: Literal["unset", "ok", "error"]
    message: Text
    """Why it failed."""
    attributes: Values
    links: list[SpanLink]
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
    busy_s: float
    bubble_s: float
    """The rest of the trace."""


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

    least: int
    mean: float
    most: int
    samples: int
    unknown: int


class ExternalLink(Model):
    """The same trace in another tool."""

    name: str
    """``Jaeger`` or ``Tempo``."""
    url: str


class Trace(TraceFacts):
    """One trace across all its processes."""

    incomplete: list[Text]
    """Why it is not whole, a sentence each; empty if nothing is amiss."""
    rows: list[SpanRow]
    """Every span; of a very large trace the longest ones."""
    rows_left_out: int
    """Spans that are not among ``rows``."""
    critical_path: list[Segment]
    """In time order; tiles the root. Empty without one."""
    process_times: list[ProcessTime]
    """That of the root first."""
    buckets: dict[Text, float]
    """Bucket to process-seconds, over all processes."""
    links_out: list[Text]
    """Traces that it links to."""
    links_in: list[Text]
    """Traces that link to it."""
    events: list[TraceEvent]
    """At most 500."""
    events_left_out: int
    stages: list[StageBytes]
    staleness: TraceStaleness | None
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


class TraceComparison(Model):
    """Two traces side by side."""

    a: TraceFacts
    b: TraceFacts
    rows: list[ComparedRow]
    """Parents first; at most 500."""
    rows_left_out: int
    buckets: list[ComparedBucket]
    critical: list[ComparedRow]
    """Seconds on the critical path by span name, the largest difference first."""
    notes: list[Text]
    """What stands in the way of comparing, a sentence each."""


# --- audit, series, live updates ------------------------------------------------------------------


class AuditEntry(Model):
    """One action that somebody asked for."""

    id: int
    time_ns: int
    actor: Text
    """How and from where: ``session 3f2b8c0d from 127.0.0.1``."""
    action: Text
    target: Text
    """The partition."""
    parameters: Values
    outcome: Text
    """``done: ...`` or ``failed: ...``."""


class Audit(Model):
    """A page of the audit record, the newest first."""

    entries: list[AuditEntry]
    next: str | None
    """The cursor of the next page; None if this is the last."""


class Series(Model):
    """The newest value of one metric series."""

    name: Text
    process: Text
    unit: Text
    attributes: Values
    value: float | None
    """Of a counter or gauge; None of a histogram."""
    histogram: Values | None
    """Count, sum, bounds and bucket counts; None of a single number."""
    time_ns: int


class Changed(Model):
    """The event ``changed`` of the live updates."""

    store: int
    """Revision of the store."""
    live: int
    """Revision of the live snapshot."""


# --- actions --------------------------------------------------------------------------------------


class ClearSamples(Model):
    """Drop samples, or a partition as a whole."""

    partition: str = Field(min_length=1, max_length=4096)
    sample_ids: list[Annotated[str, Field(min_length=1, max_length=4096)]] | None = Field(
        default=None, min_length=1, max_length=10_000
    )
    """Which; null for the whole partition and its declaration."""
    force: bool = False
    """Also what a task holds under a lease."""
    confirm: str = Field(max_length=4096)
    """The id of the partition, once more."""


class ResetConsumption(Model):
    """Let a task claim samples again that it has consumed."""

    partition: str = Field(min_length=1, max_length=4096)
    task: str = Field(min_length=1, max_length=4096)
    sample_ids: list[Annotated[str, Field(min_length=1, max_length=4096)]] = Field(
        min_length=1, max_length=10_000
    )
    confirm: str = Field(max_length=4096)
    """The id of the partition, once more."""


class EndClaim(Model):
    """End a claim as if its lease had run out: its samples can be claimed again."""

    partition: str = Field(min_length=1, max_length=4096)
    claim: str = Field(min_length=1, max_length=4096)
    expired_only: bool = True
    """Refuse a claim whose lease still runs."""
    confirm: str = Field(max_length=4096)
    """The id of the partition, once more."""


class ActionResult(Model):
    """What an action did."""

    action: Literal["clear", "reset-consumption", "end-claim"]
    partition: Text
    samples: int | None
    """How many were changed; None where the data plane does not say."""
    sentence: Text


class Problem(Model):
    """An error as RFC 9457 has it, ``application/problem+json``."""

    type: str
    title: str
    status: int
    detail: Text
    """What was found and what was expected."""
