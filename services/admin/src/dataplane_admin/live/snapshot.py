"""`Snapshot`: everything that requests see of the data plane, made whole by the polling thread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dataplane_admin.live.scan import Scan
from dataplane_admin.live.stuck import Stuck
from dataplane_admin.live.trend import Trend
from dataplane_core import PartitionSummary, StorageSummary


@dataclass(frozen=True)
class Snapshot:
    """The data plane at one moment. Never changed, only replaced.

    Attributes:
        revision: grows when something that is shown has changed.
        attached: whether the newest attempt to read succeeded.
        error: one sentence on why it did not.
        at_ns: when it was read, in nanoseconds since 1970; None if it never was.
        read_s: the same moment by `time.monotonic`.
        partitions: in the data plane's order.
        storage: its storage units.
        totals: what happened in it since it was made.
        trends: partition to its numbers over the last polls.
        scans: partition to its newest scan.
        stuck: tasks that claim nothing, and claims that nobody settles.
    """

    revision: int = 0
    attached: bool = False
    error: str | None = None
    at_ns: int | None = None
    read_s: float = 0.0
    partitions: tuple[PartitionSummary, ...] = ()
    storage: tuple[StorageSummary, ...] = ()
    totals: Mapping[str, int] = field(default_factory=dict)
    trends: Mapping[str, Trend] = field(default_factory=dict)
    scans: Mapping[str, Scan] = field(default_factory=dict)
    stuck: tuple[Stuck, ...] = ()

    def partition(self, partition_id: str) -> PartitionSummary | None:
        """One partition, None if it is not there."""
        for one in self.partitions:
            if one.partition_id == partition_id:
                return one
        return None

    def face(self) -> tuple[object, ...]:
        """What is shown, but for ages: equal faces look the same."""
        return (
            self.attached,
            self.error,
            tuple(
                (
                    one.partition_id,
                    one.revision,
                    one.declared,
                    one.put,
                    one.present,
                    one.reserved,
                    one.nbytes,
                    tuple((held.name, held.written, held.nbytes) for held in one.fields),
                    tuple(
                        (
                            task.name,
                            task.unclaimed,
                            task.assigned,
                            task.leased,
                            task.settled,
                            task.leases,
                        )
                        for task in one.tasks
                    ),
                )
                for one in self.partitions
            ),
            self.storage,
            tuple(self.totals.items()),
            tuple((scan.partition_id, scan.revision, scan.total) for scan in self.scans.values()),
            tuple((one.partition_id, one.task, one.claim) for one in self.stuck),
        )
