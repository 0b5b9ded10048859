"""Consistent read of one partition: its numbers, states, some samples and claims.

The parts come from several requests, between which samples may change. If the partition's revision
is the same before and after, all parts are one snapshot.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from dataplane_admin.live.scan import PAGE, Scan, scan_partition
from dataplane_core import (
    ClaimSummary,
    DataPlaneInspector,
    PartitionNotFoundError,
    PartitionSummary,
    SampleState,
)

_MAX_TRIES = 8
_MAX_S = 0.5


@dataclass(frozen=True)
class Moment:
    """A partition as of one moment.

    Attributes:
        at_ns: time of the read, in nanoseconds since 1970.
        spread_s: duration of the read if samples changed meanwhile; 0.0 for one snapshot.
        scan: states of its samples; None if they exceed one page.
        claims: leased claims, oldest first.
    """

    at_ns: int
    spread_s: float
    summary: PartitionSummary
    scan: Scan | None
    samples: list[SampleState]
    claims: list[ClaimSummary]


def read_moment(
    inspector: DataPlaneInspector, partition_id: str, *, start: int, limit: int
) -> Moment:
    """Read a partition; repeat while samples change, at most 8 times or half a second.

    Raises PartitionNotFoundError if the partition is not registered.
    """
    start_s = time.monotonic()
    before = _summary(inspector, partition_id)
    for attempt in range(1, _MAX_TRIES + 1):
        read_at = time.monotonic()
        scan = None
        if before.present <= PAGE:
            scan = scan_partition(inspector, before, lambda: False)
        samples = inspector.list_samples(partition_id, start=start, limit=limit)
        claims = inspector.list_claims(partition_id)
        after = _summary(inspector, partition_id)
        now = time.monotonic()
        # A store that counts no revisions reports 0.
        is_one_moment = after.revision > 0 and after.revision == before.revision
        if is_one_moment or attempt == _MAX_TRIES or now - start_s > _MAX_S:
            break
        before = after
    return Moment(
        at_ns=time.time_ns(),
        spread_s=0.0 if is_one_moment else now - read_at,
        summary=after,
        scan=scan,
        samples=samples,
        claims=claims,
    )


def _summary(inspector: DataPlaneInspector, partition_id: str) -> PartitionSummary:
    for summary in inspector.list_partitions():
        if summary.partition_id == partition_id:
            return summary
    raise PartitionNotFoundError(f"partition {partition_id!r} is not registered")
