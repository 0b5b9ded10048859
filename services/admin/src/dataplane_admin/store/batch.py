"""What is handed to the writer: the parts of one request, decoded, checked and digested.

Everything here is made outside of the writer's thread, so that its transaction only has to look up
and insert.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Chunk:
    """The spans of one trace in one request.

    Attributes:
        trace_id: 16 bytes.
        digest: equal for equal chunks only; a retry brings the same one.
        blob: an OTLP TracesData with the spans; empty if there are none.
        spans: how many.
        errors: how many failed.
        rejected: spans of the trace that limits kept out.
        run_id: ``rl.run_id``, empty if none tells it.
        step: ``rl.step``, None if none tells it.
        name: of the root if it is here, else of the first span.
        has_root: whether the root is here.
        start_ns: of the earliest span, nanoseconds since 1970.
        end_ns: of the last one to end.
        processes: eight bytes of each.
        links: other traces that its spans link to.
    """

    trace_id: bytes
    digest: bytes
    blob: bytes
    spans: int
    errors: int
    rejected: int
    run_id: str
    step: int | None
    name: str
    has_root: bool
    start_ns: int
    end_ns: int
    processes: frozenset[bytes]
    links: frozenset[bytes]


@dataclass(frozen=True, slots=True)
class LifecycleEvent:
    """One lifecycle event.

    Attributes:
        digest: equal for equal events only.
        record: an OTLP LogsData with the one record, without the ids.
        sample_ids: as bytes, see `texts.bytes_of_id`, in the order told.
        name: without the prefix.
        run_id: ``rl.run_id``, empty if not told.
        partition: empty if it concerns none.
        task: empty if it concerns none.
        step: ``rl.step``, None if not told.
        weight_version: ``rl.weight_version``, None if not told.
        samples: of the whole batch.
        time_ns: nanoseconds since 1970.
        trace_id: 16 bytes or None.
        span_id: 8 bytes or None.
        wait: digest of process and name of the wait that it begins or ends; else None.
        process: label of who told, as `SeriesPoint.process`.
        again: of a wait, whether it is told again while it lasts.
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
    again: bool


@dataclass(frozen=True, slots=True)
class SeriesPoint:
    """The newest value of one metric series; ``histogram`` is JSON, ``value`` None then."""

    digest: bytes
    process: str
    name: str
    unit: str
    attributes: str
    value: float | None
    histogram: str | None
    time_ns: int


@dataclass(frozen=True)
class AuditEntry:
    """Something that a person did.

    Attributes:
        actor: who.
        action: "clear" for example.
        target: the partition.
        parameters: what else was asked for; JSON values.
        outcome: what became of it.
        time_ns: nanoseconds since 1970.
        id: of the entry once it is stored, else 0.
    """

    actor: str
    action: str
    target: str
    parameters: Mapping[str, object]
    outcome: str
    time_ns: int
    id: int = 0


@dataclass(frozen=True)
class Batch:
    """What one request brings.

    Attributes:
        chunks: spans.
        events: lifecycle events.
        series: metrics.
        audit: what a person did.
        refused: spans, log records and data points that were kept out.
        ignored: log records that are no lifecycle events.
    """

    chunks: tuple[Chunk, ...] = ()
    events: tuple[LifecycleEvent, ...] = ()
    series: tuple[SeriesPoint, ...] = ()
    audit: tuple[AuditEntry, ...] = ()
    refused: int = 0
    ignored: int = 0
    reasons: tuple[str, ...] = field(default=())

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to store."""
        return not (self.chunks or self.events or self.series or self.audit)

    @property
    def nbytes(self) -> int:
        """About what it takes in memory."""
        return (
            sum(len(chunk.blob) + 500 for chunk in self.chunks)
            + sum(
                len(event.record) + 500 + sum(len(one) + 50 for one in event.sample_ids)
                for event in self.events
            )
            + 500 * len(self.series)
        )


@dataclass(frozen=True)
class WriteResult:
    """What became of a batch.

    Attributes:
        spans: new ones.
        events: new ones.
        series: written.
        repeated: spans and events that were there already.
    """

    spans: int = 0
    events: int = 0
    series: int = 0
    repeated: int = 0
