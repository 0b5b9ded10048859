"""Filters of the store, and results that are converted before they are shown.

Results that pages and API show are read into `dataplane_admin.models` directly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from observability.records import Records

TraceCursor: TypeAlias = tuple[int]
"""Cursor after a page of traces: `TraceModel.arrival` of the last one."""

AuditCursor: TypeAlias = tuple[int]
"""Cursor after a page of the audit log: id of the last entry."""

SampleCursor: TypeAlias = tuple[str, int]
"""Cursor after a page of samples: id and key of the last one."""


@dataclass(frozen=True)
class Downtime:
    """Time in which no service ran: from the last record before its start to its start."""

    since_ns: int = 0
    until_ns: int = 0

    def silence_ns(self, last_ns: int, now_ns: int) -> int:
        """Return the nanoseconds from ``last_ns`` to ``now_ns`` in which a service ran."""
        down_ns = min(self.until_ns, now_ns) - max(self.since_ns, last_ns)
        return now_ns - last_ns - max(0, down_ns)


NO_DOWNTIME = Downtime()


@dataclass(frozen=True)
class StepRow:
    """A finished step: a trace of a run with a step number and a finished root."""

    step: int
    trace_id: str
    start_ns: int
    seconds: float
    errors: int


@dataclass(frozen=True)
class TraceFilter:
    """Filter of traces; a None does not filter.

    Attributes:
        min_s: minimum duration in seconds.
        max_s: maximum duration in seconds.
        error: True for traces with a failed span, False for others.
        name: part of the name, case-insensitive.
        service: name of a service that took part, case-insensitive.
    """

    run_id: str | None = None
    step: int | None = None
    min_s: float | None = None
    max_s: float | None = None
    error: bool | None = None
    name: str | None = None
    service: str | None = None


@dataclass
class LoadRows:
    """Points of a metric of an engine or node: second, value and total, in order of time."""

    kind: str
    subject: str
    metric: str
    is_counter: bool
    device: str
    run_id: str
    points: list[tuple[int, float, float]]


@dataclass
class WaitRecords(Records):
    """Open waits, and the events that determine the state of their partitions.

    The last event is a copy of the newest event without name and ids; it shows which run is active.
    ``silent`` maps identity and run of each silent process to the time when it was last seen, in
    nanoseconds since 1970.
    """

    silent: Mapping[tuple[str, str], int] = field(default_factory=dict)


@dataclass(frozen=True)
class ClaimRow:
    """The newest claim or wait of a task of a partition, among the events read.

    Attributes:
        partition: stored name of the partition.
        task: stored name of the task.
        claimed: whether any of the events was a claim.
        fields: fields that the newest claim or wait requires; None if unknown.
    """

    partition: str
    task: str
    claimed: bool
    fields: tuple[str, ...] | None


@dataclass
class Counts:
    """Counters since the service started.

    Attributes:
        spans: new spans; ``events`` likewise.
        repeated: spans and events that were stored already.
        refused: rejected spans, log records and data points.
        ignored: log records that were not stored, see `Batch.ignored`.
    """

    spans: int = 0
    events: int = 0
    repeated: int = 0
    refused: int = 0
    ignored: int = 0


@dataclass(frozen=True)
class StoreTotals:
    """Totals of the store.

    Attributes:
        traces: number of stored traces; ``spans``, ``events`` and ``samples`` likewise.
        nbytes: bytes of the SQLite files, or of PostgreSQL's tables.
        oldest_ns: receive time of the oldest stored trace or event; None without any.
    """

    traces: int
    spans: int
    events: int
    samples: int
    nbytes: int
    oldest_ns: int | None
    counts: Counts
