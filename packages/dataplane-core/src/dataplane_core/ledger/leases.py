"""`Leases`: the unacknowledged claims of one partition."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dataplane_core.errors import InvalidRequestError, LeaseLostError, SamplesLeasedError, listed
from dataplane_core.ledger.rows import Holding, NamedTask, Row, Rows
from dataplane_core.ledger.selection import Ranks


@dataclass(eq=False)
class Lease(Holding):
    """A claim that is not fully acknowledged yet.

    Attributes:
        token: secret that is needed to acknowledge, renew or release it.
        name: public name, which does not reveal the token.
        task: the claiming task.
        owner: the claiming process, as the claim named it.
        claimed: ids of all samples that were claimed.
        rows: samples that it still holds, by id.
        since: when it was claimed.
        deadline: when it expires unless it is renewed.
        seconds: length of the lease.
        rank: the data-parallel rank that claimed; None without a rank.
        ranks: the ranks that share drawn batches with it; None if the claim drew alone.
    """

    token: str
    name: str
    task: NamedTask
    owner: str
    claimed: frozenset[str]
    rows: dict[str, Row]
    since: float
    deadline: float
    seconds: float
    rank: int | None = None
    ranks: Ranks | None = None

    def may_write(self, sample_id: str, row: Row | None) -> bool:
        """Return whether a put under the lease may write a sample, present or not."""
        state = None if row is None else row.states.get(self.task)
        if isinstance(state, Lease):
            return state is self
        if isinstance(state, str) and state:
            return state == self.token  # acknowledged under this lease or another
        # A sample that is absent, open or assigned may be written, unless this claim once held it.
        # A sample claimed without a lease, whose state is "", may not.
        return sample_id not in self.claimed and state != ""


class Leases(dict[str, Lease]):
    """Leases by token, in the order of their claims."""

    def __init__(self, partition_id: str) -> None:
        super().__init__()
        self._partition_id = partition_id

    def of(self, task: NamedTask) -> list[Lease]:
        """Return the leases of a task."""
        return [lease for lease in self.values() if lease.task is task]

    def take(self, lease: Lease, sample_ids: Iterable[str]) -> list[Row]:
        """Remove samples from a lease; return their rows. The lease ends with its last sample."""
        rows = [lease.rows.pop(sample_id) for sample_id in dict.fromkeys(sample_ids)]
        if not lease.rows:
            del self[lease.token]
        return rows

    def check_token(self, token: str | None, sample_ids: Iterable[str], rows: Rows) -> None:
        """Raise `LeaseLostError` if a put under a claim may not write one of the samples.

        The put may write samples that the claim holds or has acknowledged. It may write any other
        sample, unless the claim lost it, or another claim of the task holds or has acknowledged it.
        """
        if token is None:
            return
        lease = self.get(token)
        if lease is None:
            raise LeaseLostError(
                f"partition {self._partition_id!r}: the claim's lease expired or was ended; "
                "another claim may hold its samples",
                sample_ids=sample_ids,
            )
        lost = [each for each in sample_ids if not lease.may_write(each, rows.get(each))]
        if lost:
            raise LeaseLostError(
                f"partition {self._partition_id!r}: the claim no longer holds {len(lost)} of the "
                f"samples, or another claim of task {lease.task.name!r} has them: {listed(lost)}",
                sample_ids=lost,
            )

    def holding(self, token: str, sample_ids: Sequence[str], task_name: str | None) -> Lease:
        """Return the lease that holds the samples.

        Raises:
            InvalidRequestError: (a ValueError) the lease belongs to another task.
            LeaseLostError: the lease expired, or it does not hold one of the samples.
        """
        lease = self.get(token)
        if lease is None:
            raise LeaseLostError(
                f"lease on {len(sample_ids)} samples of partition {self._partition_id!r} expired "
                "or was ended; another claim may hold them",
                sample_ids=sample_ids,
            )
        if task_name is not None and lease.task.name != task_name:
            raise InvalidRequestError(
                f"partition {self._partition_id!r}: the meta names task {task_name!r}, but "
                f"its lease belongs to a claim of task {lease.task.name!r}; expected the meta that "
                "claim_meta returned, or a part of it"
            )
        lost = [sample_id for sample_id in sample_ids if sample_id not in lease.rows]
        if lost:
            raise LeaseLostError(
                f"partition {self._partition_id!r}: {len(lost)} of {len(sample_ids)} "
                "samples were acknowledged, released or cleared before, so the claim no longer "
                f"holds them: {listed(lost)}",
                sample_ids=lost,
            )
        return lease

    def refuse_leased(self, rows: Sequence[Row] | None = None) -> None:
        """Raise `SamplesLeasedError` if a lease holds one of the rows; None means all rows."""
        held: dict[str, str] = {}
        if rows is None:
            for lease in self.values():
                held.update(dict.fromkeys(lease.rows, lease.task.name))
        elif self:
            for row in rows:
                for task, state in row.states.items():
                    # A task that is no longer declared leaves its state behind, but no lease.
                    if isinstance(state, Lease) and state.token in self:
                        held[row.sample_id] = task.name
        if held:
            raise SamplesLeasedError(
                f"clear_samples(partition={self._partition_id!r}): {len(held)} samples "
                f"are leased by {listed(sorted(set(held.values())))}: {listed(held)}; acknowledge "
                "or release them first, or clear with force=True"
            )
