"""What is handed to the writer: the parts of one request, decoded, checked and digested.

Everything here is made outside of the writer's thread, so that its transaction only has to look up
and insert.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal  # Any: JSON values

from observability.records import Process


def span_key(span_id: bytes) -> int:
    """The id of a span as a number that a database holds."""
    return int.from_bytes(span_id, "big", signed=True)


def span_state(*, times: int, failed: bool) -> int:
    """What is known of a span: how many of its start and end (0 to 2), and whether it failed.

    Of two copies of a span the one that knows more times counts.
    """
    return times << 1 | failed


def wait_digest(process: Process, name: str) -> bytes:
    """What the beginning and the end of a wait share: names of waits are unique in their process
    only."""
    told = json.dumps([process.identity, name]).encode()
    return hashlib.blake2b(told, digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class Chunk:
    """The spans of one trace in one request.

    Attributes:
        trace_id: 16 bytes.
        digest: equal for equal chunks only; a retry brings the same one.
        blob: an OTLP TracesData with the spans; empty if there are none.
        spans: how many, a repeated one each time.
        states: `span_key` of each span to its `span_state`.
        rejected: spans of the trace that limits kept out.
        run_id: ``rl.run_id``, empty if none tells it.
        step: ``rl.step``, None if none tells it.
        name: of the root if it is here, else of the first span.
        has_root: whether the root is here, and has ended.
        start_ns: of the earliest span, nanoseconds since 1970; 0 if no time was reported.
        end_ns: of the last one to end, as ``start_ns``.
        processes: eight bytes of each.
        links: other traces that its spans link to.
    """

    trace_id: bytes
    digest: bytes
    blob: bytes
    spans: int
    states: Mapping[int, int]
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
        time_ns: nanoseconds since 1970; when it was received if it reports no time.
        trace_id: 16 bytes or None.
        span_id: 8 bytes or None.
        wait: digest of process and name of the wait that it begins or ends; else None.
        process: label of who reported it, as `SeriesPoint.process`.
        process_id: 16 bytes, equal for equal resources only.
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
    process_id: bytes
    again: bool


@dataclass(frozen=True, slots=True)
class SeriesPoint:
    """One data point of a metric series.

    Attributes:
        digest: of the series: equal for equal resources, scopes, metrics and attributes only.
        point: eight bytes, equal for equal points only; empty of one without a time, which cannot
            be told from the next one with the same value.
        process: label of the process.
        process_id: 16 bytes, equal for equal resources only.
        scope: name of the instrumentation scope, empty if unknown.
        name: of the metric.
        unit: of the metric.
        attributes: JSON.
        figures: ``value`` of a number; ``count`` and what else is known of a histogram; None where
            nothing was recorded.
        temporality: how it adds to the points before it. "delta": on top of them. "cumulative": in
            their place, until the counting starts anew. "newest": in their place.
        start_ns: when the counting started, nanoseconds since 1970; 0 if unknown.
        time_ns: of the point, as ``start_ns``.
    """

    digest: bytes
    point: bytes
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
        refused: spans, log records and data points that were kept out: a digest of each, which
            is equal for one that is sent again.
        ignored: log records that are no lifecycle events, as ``refused``.
        reasons: why some were refused.
    """

    chunks: tuple[Chunk, ...] = ()
    events: tuple[LifecycleEvent, ...] = ()
    series: tuple[SeriesPoint, ...] = ()
    audit: tuple[AuditEntry, ...] = ()
    refused: tuple[bytes, ...] = ()
    ignored: tuple[bytes, ...] = ()
    reasons: tuple[str, ...] = field(default=())

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to store."""
        return not (self.chunks or self.events or self.series or self.audit)

    @property
    def nbytes(self) -> int:
        """About what it takes in memory."""
        return (
            sum(len(chunk.blob) + 500 + 100 * len(chunk.states) for chunk in self.chunks)
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
