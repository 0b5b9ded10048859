"""One partition as of one moment: its numbers, states, some samples and claims, read together.

The parts are answers of several requests, between which samples move. The partition's revision says
whether any did: where it is the same before and after, all parts are of one moment.
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
    """A partition, read at once.

    Attributes:
        at_ns: when it was read, in nanoseconds since 1970.
        spread_s: how long reading took while samples moved; 0.0 where none did, so that every part
            is of one moment.
        summary: the partition in numbers.
        scan: where its samples stand; None if they are more than one page of states.
        samples: those that were asked for.
        claims: those under leases, oldest first.
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
    """Read a partition, again while samples move meanwhile, at most 8 times or half a second.

    Args:
        inspector: what is asked.
        partition_id: which partition.
        start: place of the first sample to list.
        limit: how many to list.

    Raises:
        PartitionNotFoundError: the partition is not registered.
    """
    began = time.monotonic()
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
        if is_one_moment or attempt == _MAX_TRIES or now - began > _MAX_S:
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
