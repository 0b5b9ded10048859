"""Changes by an operator: reset of consumption, and end of claims.

They are for the operator of a stuck run, not for the run itself. All promises of claims still hold.
"""

from __future__ import annotations

from collections.abc import Sequence

from dataplane_core.errors import SamplesLeasedError, listed
from dataplane_core.ledger.assignments import Assignment
from dataplane_core.ledger.partition import Partition


def reset_consumption(partition: Partition, task_name: str, sample_ids: Sequence[str]) -> list[str]:
    """Reset consumption as `DataPlaneActions.reset_consumption`; return the samples reset."""
    task = partition.task(task_name)
    known = (partition.rows.get(sample_id) for sample_id in dict.fromkeys(sample_ids))
    rows = [row for row in known if row is not None and task in row.states]
    leased = [row.sample_id for row in rows if task.lease_of(row) is not None]
    if leased:
        raise SamplesLeasedError(
            f"reset_consumption(partition={partition.declaration.partition_id!r}, "
            f"task={task_name!r}): {len(leased)} samples are leased: {listed(leased)}; end their "
            "claims first, or omit them"
        )
    for row in rows:
        state = row.states[task]
        if isinstance(state, Assignment):
            task.assignments.take(state, [row.sample_id])
    partition.reopen(task, rows)
    return [row.sample_id for row in rows]


def end_claim(partition: Partition, claim: str, now: float, *, expired_only: bool) -> int:
    """End a claim as `DataPlaneActions.end_claim`; return how many samples it still held."""
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
    return partition.end_lease(lease)
