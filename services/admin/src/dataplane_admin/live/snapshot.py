"""`Snapshot`: the data plane as requests see it, replaced by the polling thread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from dataplane_admin.live.scan import Scan
from dataplane_admin.live.stuck import Stuck
from dataplane_admin.live.trend import Trend
from dataplane_core import PartitionSummary, StorageSummary, TaskSummary


@dataclass(frozen=True)
class Snapshot:
    """The data plane at one moment. Immutable.

    Attributes:
        revision: number that grows when something that is shown changes.
        attached: whether the newest poll succeeded.
        error: one sentence on why the poll failed, or on a fault: the data plane can be read, but
            no longer answers its clients. Else None.
        fault_ns: time of the first poll that reported the fault, in nanoseconds since 1970; None
            without a fault.
        at_ns: time of the read, in nanoseconds since 1970; None before the first read.
        read_s: the same time by `time.monotonic`.
        partitions: partitions in the data plane's order.
        storage: storage units, as of the last poll that could read them.
        storage_error: one sentence on why this poll could not read them; else None.
        storage_ns: time of the last poll that could read them; None before it.
        totals: counters since the store was created.
        trends: partition to its numbers over the last polls.
        history: partition to its numbers over the last hour.
        scans: partition to its newest scan.
        stuck: idle tasks and old claims.
    """

    revision: int = 0
    attached: bool = False
    error: str | None = None
    fault_ns: int | None = None
    at_ns: int | None = None
    read_s: float = 0.0
    partitions: tuple[PartitionSummary, ...] = ()
    storage: tuple[StorageSummary, ...] = ()
    storage_error: str | None = None
    storage_ns: int | None = None
    totals: Mapping[str, int] = field(default_factory=dict)
    trends: Mapping[str, Trend] = field(default_factory=dict)
    history: Mapping[str, Trend] = field(default_factory=dict)
    scans: Mapping[str, Scan] = field(default_factory=dict)
    stuck: tuple[Stuck, ...] = ()

    def partition(self, partition_id: str) -> PartitionSummary | None:
        """Return one partition, None if it does not exist."""
        for summary in self.partitions:
            if summary.partition_id == partition_id:
                return summary
        return None

    def visible_state(self) -> tuple[object, ...]:
        """Return everything that is shown except ages, to compare snapshots."""
        return (
            self.attached,
            self.error,
            [
                replace(item, tasks=tuple(map(_without_ages, item.tasks)))
                for item in self.partitions
            ],
            self.storage,
            self.storage_error,
            self.totals,
            [(scan.partition_id, scan.revision, scan.total) for scan in self.scans.values()],
            [
                (item.partition_id, item.task, item.claim and item.claim.claim)
                for item in self.stuck
            ],
        )


def _without_ages(task: TaskSummary) -> TaskSummary:
    return replace(task, oldest_unclaimed_s=None, oldest_claim=None)
