"""`LeaseBook`: the claims of one partition that are not settled yet, and how they end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from dataplane_core.declaration import PartitionDeclaration
from dataplane_core.errors import LeaseLostError, SamplesLeasedError, listed
from dataplane_core.ledger.rows import Row
from dataplane_core.ledger.tasks import Lease, Task


class LeaseBook:
    """What of a `PartitionBook` concerns leases.

    Attributes:
        declaration: of the partition.
        totals: of the store.
        tasks: by name.
        leases: by token, in the order of their claims.
        revision: grows with every change.
    """

    declaration: PartitionDeclaration
    totals: Counter[str]
    tasks: dict[str, Task]
    leases: dict[str, Lease]
    revision: int
    _revisions: Iterator[int]

    def touch(self) -> None:
        """Something changed: ``revision`` grows."""
        self.revision = next(self._revisions)

    def expire(self, now: float) -> bool:
        """End the leases whose time is over; True if there were any."""
        over = [lease for lease in self.leases.values() if lease.deadline <= now]
        for lease in over:
            self.end_early(lease)
        return bool(over)

    def end_early(self, lease: Lease) -> int:
        """A lease is over before its claim was settled; returns how many samples it still held."""
        count = len(lease.rows)
        self.totals["leases_expired"] += 1
        self.totals["samples_redelivered"] += count
        self._end(lease, list(lease.rows), settle=False)
        return count

    def next_expiry(self) -> float | None:
        """When the next lease ends, on the caller's clock."""
        return min((lease.deadline for lease in self.leases.values()), default=None)

    def check_token(self, token: str | None, sample_ids: Iterable[str]) -> None:
        """Raise `LeaseLostError` if a claim's lease has ended, for all or some of the samples.

        What the claim holds or has acknowledged may be put under it, and what it never held unless
        another claim of its task holds or has settled that.
        """
        if token is None:
            return
        lease = self.leases.get(token)
        if lease is None:
            raise LeaseLostError(
                f"partition {self.declaration.partition_id!r}: the claim's lease expired or was "
                "ended; another claim may hold its samples",
                sample_ids=sample_ids,
            )
        task = self.tasks[lease.task_name]
        lost = [sample_id for sample_id in sample_ids if not _may_write(lease, task, sample_id)]
        if lost:
            raise LeaseLostError(
                f"partition {self.declaration.partition_id!r}: {len(lost)} of the samples were "
                f"given up by the claim, or belong to another of task {lease.task_name!r}: "
                f"{listed(lost)}",
                sample_ids=lost,
            )

    def settle(self, token: str, sample_ids: Sequence[str], *, acknowledge: bool) -> str:
        """Acknowledge or release the given samples of a lease; the rest stays leased.

        Returns:
            The task that held them.

        Raises:
            LeaseLostError: the lease ended, or it does not hold one of the samples.
        """
        lease = self._lease(token, sample_ids)
        self._end(lease, sample_ids, settle=acknowledge)
        kind = "samples_acknowledged" if acknowledge else "samples_released"
        self.totals[kind] += len(sample_ids)
        return lease.task_name

    def renew(self, token: str, sample_ids: Sequence[str], now: float) -> None:
        """Start a lease anew. Raises as `settle`."""
        lease = self._lease(token, sample_ids)
        lease.deadline = now + lease.seconds
        self.touch()

    def _lease(self, token: str, sample_ids: Sequence[str]) -> Lease:
        lease = self.leases.get(token)
        if lease is None:
            raise LeaseLostError(
                f"lease on {len(sample_ids)} samples of partition "
                f"{self.declaration.partition_id!r} expired or was ended; another claim may hold "
                "them",
                sample_ids=sample_ids,
            )
        lost = [sample_id for sample_id in sample_ids if sample_id not in lease.rows]
        if lost:
            raise LeaseLostError(
                f"partition {self.declaration.partition_id!r}: {len(lost)} of {len(sample_ids)} "
                "samples were settled, given back or cleared before, so the claim no longer "
                f"holds them: {listed(lost)}",
                sample_ids=lost,
            )
        return lease

    def _end(self, lease: Lease, sample_ids: Iterable[str], *, settle: bool) -> None:
        task = self.tasks[lease.task_name]
        ids = dict.fromkeys(sample_ids)
        rows = [lease.rows.pop(sample_id) for sample_id in ids]
        for sample_id in ids:
            del task.leased[sample_id]
        if settle:
            task.settled.update(dict.fromkeys(ids, lease.token))
            self.touch()
        else:
            self.reopen(task, rows)
        if not lease.rows:
            del self.leases[lease.token]

    def reopen(self, task: Task, rows: list[Row]) -> None:
        """Make rows that a task had claimed claimable again."""
        task.reopen(rows)
        task.tell(rows)
        self.touch()

    def refuse_leased(self, sample_ids: Iterable[str] | None = None) -> None:
        """Raise `SamplesLeasedError` if a task holds one of the samples, or any, under a lease."""
        if not self.leases:
            return
        asked = None if sample_ids is None else list(sample_ids)
        held = {
            sample_id: name
            for name, task in self.tasks.items()
            if task.leased
            for sample_id in (task.leased if asked is None else asked)
            if sample_id in task.leased
        }
        if held:
            raise SamplesLeasedError(
                f"clear_samples(partition={self.declaration.partition_id!r}): {len(held)} samples "
                f"are leased by {listed(sorted(set(held.values())))}: {listed(held)}; acknowledge "
                "or release them first, or clear with force=True"
            )


def _may_write(lease: Lease, task: Task, sample_id: str) -> bool:
    """Whether a put under the lease may write the sample."""
    holder = task.leased.get(sample_id) or task.settled.get(sample_id)
    if holder is not None:
        return holder == lease.token
    # Given up, or settled by a final claim, or nobody's.
    return sample_id not in lease.claimed and sample_id not in task.settled
