"""What is changed by hand: consumption taken back, and claims ended.

A person who looks at a stuck run does this, not the run itself; every promise of claims holds over
it.
"""

from __future__ import annotations

from collections.abc import Sequence

from dataplane_core.errors import SamplesLeasedError, listed
from dataplane_core.ledger.partition import PartitionBook


def reset_consumption(
    partition: PartitionBook, task_name: str, sample_ids: Sequence[str]
) -> list[str]:
    """As `DataPlaneActions.reset_consumption`; returns the samples that are claimable again."""
    task = partition.task(task_name)
    leased = [sample_id for sample_id in sample_ids if sample_id in task.leased]
    if leased:
        raise SamplesLeasedError(
            f"reset_consumption(partition={partition.declaration.partition_id!r}, "
            f"task={task_name!r}): {len(leased)} samples are leased: {listed(leased)}; end their "
            "claims first, or leave them out"
        )
    asked = dict.fromkeys(sample_ids)
    reset = [each for each in asked if each in task.settled or each in task.assigned]
    for sample_id in reset:
        task.settled.pop(sample_id, None)
        share = task.assigned.get(sample_id)
        if share is not None:
            partition.unassign(task, share, [sample_id])
    partition.reopen(task, [partition.rows[sample_id] for sample_id in reset])
    return reset


def end_claim(partition: PartitionBook, claim: str, now: float, *, expired_only: bool) -> int:
    """As `DataPlaneActions.end_claim`."""
    lease = next((lease for lease in partition.leases.values() if lease.name == claim), None)
    if lease is None:
        return 0
    left_s = lease.deadline - now
    if expired_only and left_s > 0:
        raise SamplesLeasedError(
            f"end_claim(partition={partition.declaration.partition_id!r}, claim={claim!r}): "
            f"{len(lease.rows)} samples are leased by {lease.owner!r} for {left_s:.3g} s more; "
            "wait, or end it with expired_only=False"
        )
    return partition.end_early(lease)
