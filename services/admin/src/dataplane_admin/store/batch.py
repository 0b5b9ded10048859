"""Batches for the writer: the parts of one request, decoded, checked and digested.

They are built outside of the writer's thread, so that its transactions only look up and insert.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal  # Any: JSON values

from dataplane_admin.models import AuditEntry
from dataplane_admin.store.chunk import Chunk
from dataplane_admin.store.work import Work
from observability.records import Process


def wait_digest(process: Process, name: str) -> bytes:
    """Return the digest that the start and the end of a wait share.

    Names of waits are unique within their process only.
    """
    key = json.dumps([process.identity, name]).encode()
    return hashlib.blake2b(key, digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class RunChange:
    """Change of a run that its start or its end reports.

    Attributes:
        state: state of the run from then on.
        error: class and message of the error that ended it; empty without one.
        resumed_from: first step after a resume, else None.
        config: value of each key of the configuration; None if not reported.
    """

    state: Literal["running", "finished", "stopped", "failed"]
    error: str
    resumed_from: int | None
    config: Mapping[str, str] | None


@dataclass(frozen=True, slots=True)
class LifecycleEvent:
    """One lifecycle event.

    Attributes:
        digest: digest that only equal events share.
        record: compressed OTLP LogsData with this record, without the ids.
        sample_ids: ids as bytes, see `texts.bytes_of_id`, in reported order.
        name: event name without the prefix.
        run_id: ``rl.run_id``, empty if unknown.
        partition: partition, empty if none.
        task: task, empty if none.
        step: ``rl.step``, None if unknown.
        weight_version: ``rl.weight_version``, None if unknown.
        samples: number of samples of the entire batch.
        time_ns: nanoseconds since 1970; the receive time if no time was reported.
        trace_id: 16 bytes or None.
        span_id: 8 bytes or None.
        wait: digest of process and name of the wait that it starts or ends; else None.
        process: label of the reporting process, as `SeriesPoint.process`.
        process_id: 16 bytes that only equal resources share.
        is_periodic: whether a wait is reported repeatedly while it lasts.
        run: the start or end of a run; None for other events.
    """

    digest: bytes
    record: bytes
    sample_ids: tuple[bytes, ...]
    name: str
    run_id: str
    partition: str
    task: str
    step: int | None
    weight_version: int | None
    samples: int
    time_ns: int
    trace_id: bytes | None
    span_id: bytes | None
    wait: bytes | None
    process: str
    process_id: bytes
    is_periodic: bool
    run: RunChange | None = None


@dataclass(frozen=True, slots=True)
class TraceLog:
    """One log record of a trace, other than lifecycle events.

    Attributes:
        trace_id: 16 bytes.
        digest: digest that only equal records share.
        record: compressed OTLP LogsData with this record.
    """

    trace_id: bytes
    digest: bytes
    record: bytes


@dataclass(frozen=True, slots=True)
class SampleFacts:
    """Facts of a sample; unknown ones are None or empty.

    Attributes:
        run_id: ``rl.run_id``, empty if unknown.
        sample: id as bytes, see `texts.bytes_of_id`.
        time_ns: time of the record, nanoseconds since 1970. Later facts replace earlier ones.
        step: step that trains or trained on it.
        group: id of its group: the samples of one prompt.
        reward: reward, unscaled.
        advantage: advantage.
        length: tokens of its response.
        truncated: whether the response was truncated.
        first_version: oldest version of the weights that generated it.
        last_version: newest version, as ``first_version``.
        state: for example ``generated``, ``trained`` or ``dropped``.
        tags: lines ``name=value``, see `texts.lines_of`; empty without any.
        is_record: whether a record of facts reported it, not a lifecycle event or a text.
    """

    run_id: str
    sample: bytes
    time_ns: int
    step: int | None = None
    group: str = ""
    reward: float | None = None
    advantage: float | None = None
    length: int | None = None
    truncated: bool | None = None
    first_version: int | None = None
    last_version: int | None = None
    state: str = ""
    tags: str = ""
    is_record: bool = True


@dataclass(frozen=True, slots=True)
class SampleText:
    """Turns and tokens of a sample as JSON; the other attributes as `SampleFacts`."""

    run_id: str
    sample: bytes
    step: int | None
    time_ns: int
    text: str


@dataclass(frozen=True, slots=True)
class SeriesPoint:
    """One data point of a metric series.

    Attributes:
        digest: digest of the series: of its resource, scope, metric and attributes.
        point_digest: eight bytes that only equal points share; empty without a time, since the next
            point with the same value would look like a resent point.
        process: label of the process.
        process_id: 16 bytes that only equal resources share.
        scope: name of the instrumentation scope, empty if unknown.
        attributes: attributes as JSON.
        figures: ``value`` of a number; ``count`` and other known figures of a histogram; None if
            nothing was recorded, or a number is not finite.
        temporality: how the point combines with earlier ones. "delta" adds to them. "cumulative"
            replaces them until the counter restarts. "newest" replaces them.
        start_ns: start of the counter, nanoseconds since 1970; 0 if unknown.
        time_ns: time of the point, as ``start_ns``.
        run_id: ``rl.run_id``, empty if unknown.
        step: ``rl.step`` of a number, None if unknown; then the point belongs to no curve.
    """

    digest: bytes
    point_digest: bytes
    process: str
    process_id: bytes
    scope: str
    name: str
    unit: str
    attributes: str
    figures: Mapping[str, Any] | None
    temporality: Literal["delta", "cumulative", "newest"]
    start_ns: int
    time_ns: int
    run_id: str = ""
    step: int | None = None


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """The load of an engine or node in one second, by one metric of `load_metrics`.

    Attributes:
        digest: digest of the series: of subject, metric, ``is_counter``, device and run.
        kind: ``engine`` or ``node``.
        subject: name of the engine or node.
        is_counter: whether value and total are counters.
        device: the GPU, empty if the metric has none.
        run_id: ``rl.run_id``, empty if unknown.
        second: seconds since 1970.
        total: total of a ratio.
    """

    digest: bytes
    kind: Literal["engine", "node"]
    subject: str
    metric: str
    is_counter: bool
    device: str
    run_id: str
    second: int
    value: float
    total: float


@dataclass(frozen=True)
class Batch:
    """The records of one request.

    Attributes:
        logs: other log records of traces.
        series: points of metrics.
        load: load of engines and nodes.
        samples: facts and text of samples.
        tags: run ids with the tags that replace those of the run.
        changes: functions that read and change further tables in the transaction, and return
            whether a page shows the change. Each may be called again if a commit fails.
        refused: digests of rejected spans, log records and data points; a resent record has the
            same digest.
        ignored: digests of log records that are not stored: outside of traces, or text of samples
            without ``keep_sample_text``.
    """

    chunks: tuple[Chunk, ...] = ()
    events: tuple[LifecycleEvent, ...] = ()
    logs: tuple[TraceLog, ...] = ()
    series: tuple[SeriesPoint, ...] = ()
    load: tuple[LoadPoint, ...] = ()
    samples: tuple[SampleFacts | SampleText, ...] = ()
    audit: tuple[AuditEntry, ...] = ()
    tags: tuple[tuple[str, tuple[str, ...]], ...] = ()
    changes: tuple[Callable[[Work], bool], ...] = ()
    refused: tuple[bytes, ...] = ()
    ignored: tuple[bytes, ...] = ()
    reasons: tuple[str, ...] = field(default=())

    @property
    def is_empty(self) -> bool:
        """True if the batch has nothing to store."""
        telemetry = (self.chunks, self.events, self.logs, self.series, self.load, self.samples)
        return not any((*telemetry, self.audit, self.tags))

    @property
    def nbytes(self) -> int:
        """Approximate size in memory."""
        return (
            sum(
                len(chunk.blob) + 500 + 100 * (len(chunk.states) + len(chunk.links))
                for chunk in self.chunks
            )
            + sum(map(_event_bytes, self.events))
            + sum(len(log.record) + 300 for log in self.logs)
            + sum(map(_series_bytes, self.series))
            + 300 * len(self.load)
            + sum(
                500 + len(each.text if isinstance(each, SampleText) else each.tags)
                for each in self.samples
            )
        )


def _event_bytes(event: LifecycleEvent) -> int:
    config = event.run.config if event.run is not None else None
    return (
        len(event.record)
        + 500
        + sum(len(sample_id) + 50 for sample_id in event.sample_ids)
        + sum(len(key) + len(value) + 100 for key, value in (config or {}).items())
    )


def _series_bytes(point: SeriesPoint) -> int:
    figures = (point.figures or {}).values()
    # The lists are the buckets of a histogram.
    numbers = sum(len(figure) for figure in figures if isinstance(figure, list))
    return 500 + len(point.name) + len(point.unit) + len(point.attributes) + 40 * numbers


@dataclass(frozen=True)
class WriteResult:
    """New spans and events of a batch, and how many were stored already."""

    spans: int = 0
    events: int = 0
    repeated: int = 0
