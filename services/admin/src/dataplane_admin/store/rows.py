"""What the store answers: plain rows. Times are nanoseconds since 1970; trace ids hexadecimal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias  # Any: JSON values

from observability.records import Records


@dataclass(frozen=True)
class RunRow:
    """A run: ``steps`` is how many different ones its traces tell."""

    run_id: str
    first_ns: int
    last_ns: int
    steps: int


@dataclass(frozen=True)
class StepRow:
    """A step that has ended: a trace of a run that tells a number and has its root, ended."""

    step: int
    trace_id: str
    start_ns: int
    seconds: float
    errors: int


@dataclass(frozen=True)
class TraceFilter:
    """Which traces; None lets all through.

    Attributes:
        run_id: of this run.
        step: of this step.
        min_s: as long as this, in seconds, or longer.
        max_s: as long as this or shorter.
        error: True with a failed span, False without.
        name: with this in their name, in upper or lower case.
    """

    run_id: str | None = None
    step: int | None = None
    min_s: float | None = None
    max_s: float | None = None
    error: bool | None = None
    name: str | None = None


@dataclass(frozen=True)
class Cursor:
    """Where a page of traces ended: `TraceModel.arrival` of the last one."""

    arrival: int


@dataclass(frozen=True)
class TraceRow:
    """One trace; ``run_id`` is empty and ``step`` None if not told.

    ``start_ns`` and ``end_ns`` are by the clocks of the senders, 0 if none reported a time;
    ``updated_ns`` is when the service received something of it last. ``has_root``: its root has
    ended. Without a root ``name`` is that of its first span. ``rejected`` spans were kept out by
    limits.
    """

    trace_id: str
    run_id: str
    step: int | None
    name: str
    start_ns: int
    end_ns: int
    has_root: bool
    spans: int
    errors: int
    processes: int
    rejected: int
    updated_ns: int

    @property
    def seconds(self) -> float:
        """How long it took so far."""
        return max(0, self.end_ns - self.start_ns) / 1e9


SampleCursor: TypeAlias = tuple[str, int]
"""Where a page of samples ended: `SampleRow.cursor`."""


@dataclass(frozen=True)
class SampleRow:
    """One sample of one partition of one run; ``weight_version`` is that of its first put since it
    was cleared."""

    key: int
    sample_id: str
    partition: str
    run_id: str
    weight_version: int | None
    first_ns: int
    last_ns: int

    @property
    def cursor(self) -> SampleCursor:
        """To go on behind it."""
        return self.sample_id, self.key


@dataclass(frozen=True)
class StalenessRow:
    """How many samples were trained how many versions after their generation.

    Attributes:
        counts: versions to samples.
        unknown: samples of which a version is not known.
        left_out: steps that were not looked at, because the newer ones were that many samples.
    """

    counts: Mapping[int, int]
    unknown: int
    left_out: int = 0


@dataclass
class WaitRecords(Records):
    """Waits that have not ended, and what shapes their partitions. The last event is whatever was
    told last, without a name and ids: of the run that goes on.

    Attributes:
        silent: of each process that waits and is not heard of any more, as (its identity, the
            run), when it last was.
        received_ns: of each of the first events, which are the waits, when this service received
            it.
    """

    silent: Mapping[tuple[str, str], int] = field(default_factory=dict)
    received_ns: Sequence[int] = ()

    def with_receipts(self) -> Records:
        """The records, of which the waits have the times at which they were received."""
        waits = len(self.received_ns)
        pairs = zip(self.events[:waits], self.received_ns, strict=True)
        events = [replace(event, received_ns=received_ns) for event, received_ns in pairs]
        return Records(self.spans, [*events, *self.events[waits:]])


@dataclass(frozen=True)
class ClaimRow:
    """The newest claim, or wait for one, of a task of a partition, of those that were looked at.

    Attributes:
        partition: as it is stored.
        task: as it is stored.
        claimed: whether one of them was a claim.
        fields: that the newest needs; None if it did not tell.
    """

    partition: str
    task: str
    claimed: bool
    fields: tuple[str, ...] | None


@dataclass(frozen=True)
class EventRow:
    """A lifecycle event without its ids; ``samples`` is the size of the whole batch."""

    id: int
    run_id: str
    step: int | None
    name: str
    partition: str
    task: str
    time_ns: int
    trace_id: str
    span_id: str
    samples: int
    weight_version: int | None


@dataclass(frozen=True)
class SeriesRow:
    """What the points of a metric series come to: a ``value``, or a ``histogram``.

    A histogram has ``count``, and where known ``sum``, ``min``, ``max``, ``bounds``, ``counts``.
    ``process`` is a label that no other process among the rows has, ``process_id`` the identity of
    the process. ``time_ns`` is by the clock of the sender, 0 if it reported none; ``received_ns``
    is when the service received the last point.
    """

    process: str
    process_id: str
    scope: str
    name: str
    unit: str
    attributes: Mapping[str, Any]
    value: float | None
    histogram: Mapping[str, Any] | None
    time_ns: int
    received_ns: int


@dataclass(frozen=True)
class StoreTotals:
    """How much there is.

    Attributes:
        traces: rows; as ``spans``, ``events`` and ``samples``.
        bytes_on_disk: of the SQLite files, or of the tables in PostgreSQL.
        oldest_ns: when the oldest of what is there was received; None if nothing is.
        ingested_spans: new ones since this service started; as ``ingested_events``.
        repeated: spans and events since the start that were there already.
        refused: spans, log records and data points kept out since the start.
        ignored: log records since the start that are no lifecycle events.
    """

    traces: int
    spans: int
    events: int
    samples: int
    bytes_on_disk: int
    oldest_ns: int | None
    ingested_spans: int
    ingested_events: int
    repeated: int
    refused: int
    ignored: int
