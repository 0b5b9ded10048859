"""`Ledger`: all partitions of a store, their shared capacity, and the running puts."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any  # Any: cells belong to the storage, tags to the caller

from dataplane_core.declaration import PartitionDeclaration, capacity_exceeded, check_kinds
from dataplane_core.errors import (
    CapacityExceeded,
    DataPlaneError,
    InvalidRequestError,
    PartitionNotFoundError,
    listed,
)
from dataplane_core.ledger.cells import SharedCells
from dataplane_core.ledger.order import ClaimOrder
from dataplane_core.ledger.partition import Partition
from dataplane_core.ledger.rows import Row, cells_of
from dataplane_core.ledger.sizes import Measure
from dataplane_core.schema import Form

TOTALS = (
    "puts",
    "puts_aborted",
    "samples_put",
    "claims",
    "samples_claimed",
    "leases_expired",
    "samples_expired",
    "samples_acknowledged",
    "samples_released",
    "clears",
    "samples_cleared",
)
"""Names of the counters of `Ledger.totals`."""


@dataclass(eq=False)
class PutTicket:
    """A put that was admitted and is not committed yet.

    Attributes:
        partition: the target; never a partition registered later under the same name.
        sample_ids: the samples that it writes.
        reserved: new samples among them, for which capacity is reserved.
        kinds: field to kind.
        token: token of the lease under which it writes, or None.
        open: False once the put is committed or aborted.
        forms: field to form, for fields that have one.
    """

    partition: Partition
    sample_ids: list[str]
    reserved: list[str]
    kinds: dict[str, str]
    token: str | None = None
    open: bool = True
    forms: dict[str, Form] = field(default_factory=dict)

    @property
    def partition_id(self) -> str:
        """Name of the partition."""
        return self.partition.declaration.partition_id


class Ledger:
    """The bookkeeping of one store.

    Args:
        capacity: maximum samples of all partitions together; None means no limit.
        discard: called with the cells that are no longer referenced.
        order: order of claims without a seed; None means the order of first puts.
        measure: returns the bytes of cells of one field; None if the store does not know them.

    Attributes:
        totals: counters since the store was created, see `TOTALS`; they never decrease.
    """

    def __init__(
        self,
        capacity: int | None,
        discard: Callable[[list[Any]], None] = lambda cells: None,
        order: ClaimOrder | None = None,
        measure: Measure | None = None,
    ) -> None:
        self._order = order
        self._measure = measure
        self.totals: Counter[str] = Counter(dict.fromkeys(TOTALS, 0))
        self.capacity = capacity
        self.partitions: dict[str, Partition] = {}
        self._discard = discard
        self._sequence = itertools.count()
        # Shared by all partitions, so that revisions and fencing numbers do not restart when a
        # partition is registered again.
        self._revisions = itertools.count(1)
        self._fence = itertools.count(1)

    @property
    def held(self) -> int:
        """Samples that count against the capacity, in all partitions."""
        return sum(partition.held for partition in self.partitions.values())

    def register(self, declaration: PartitionDeclaration) -> None:
        """Declare a partition, or replace its declaration."""
        partition = self.partitions.get(declaration.partition_id)
        if partition is None:
            self.partitions[declaration.partition_id] = Partition(
                declaration, self._order, self.totals, self._measure, self._revisions, self._fence
            )
        else:
            partition.redeclare(declaration)

    def partition(self, partition_id: str) -> Partition:
        """Return the partition; if unknown, raise an error that names the registered ones."""
        partition = self.partitions.get(partition_id)
        if partition is None:
            raise PartitionNotFoundError(
                f"partition {partition_id!r} is not registered; registered: "
                f"{listed(sorted(self.partitions)) or 'none'}"
            )
        return partition

    def check_registered(self, partition: Partition) -> None:
        """Raise `PartitionNotFoundError` if ``partition`` was cleared, or cleared and replaced.

        A put that had to wait passes the partition with which it began.
        """
        partition_id = partition.declaration.partition_id
        if self.partition(partition_id) is not partition:
            raise PartitionNotFoundError(
                f"put_samples(partition={partition_id!r}): the partition was cleared and "
                "registered again since the put began; put again if its samples belong to the new "
                "partition"
            )

    def begin_put(
        self,
        partition_id: str,
        sample_ids: Sequence[str],
        kinds: Mapping[str, str],
        token: str | None = None,
        forms: Mapping[str, Form] | None = None,
    ) -> PutTicket | None:
        """Admit a put: reserve capacity for its new samples, and set the kinds of its fields.

        Returns:
            The ticket for `commit_put` or `abort_put`; None if there is no free capacity now.

        Raises:
            PartitionNotFoundError, SchemaMismatchError, LeaseLostError: the put is not allowed.
            CapacityExceeded: the put has more samples than the store can ever hold.
        """
        partition = self.partition(partition_id)
        partition.leases.check_token(token, sample_ids, partition.rows)
        check_kinds(kinds, partition.samples.kinds, partition_id=partition_id)
        pending = {name: users[0] for name, users in partition.pending_kinds.items()}
        check_kinds(kinds, pending, partition_id=partition_id)
        new = [sample_id for sample_id in sample_ids if sample_id not in partition.rows]
        needed = sum(sample_id not in partition.reserved for sample_id in new)
        if self.capacity is not None and self.held + needed > self.capacity:
            if needed > self.capacity:
                raise self.capacity_error(partition_id, sample_ids)
            return None
        for sample_id in new:
            partition.reserved[sample_id] = partition.reserved.get(sample_id, 0) + 1
        for name, kind in kinds.items():
            partition.pending_kinds.setdefault(name, []).append(kind)
        partition.touch()
        return PutTicket(
            partition, list(sample_ids), new, dict(kinds), token, forms=dict(forms or {})
        )

    def capacity_error(self, partition_id: str, sample_ids: Iterable[str]) -> CapacityExceeded:
        """Return the error of a put for which there is no capacity."""
        partition = self.partition(partition_id)
        return capacity_exceeded(
            partition_id,
            new=sum(i not in partition.rows and i not in partition.reserved for i in sample_ids),
            held=self.held,
            capacity=self.capacity or 0,
        )

    def check_commit(self, ticket: PutTicket) -> None:
        """Raise the error that `commit_put` would raise; otherwise an immediate commit succeeds.

        Raises:
            PartitionNotFoundError: the partition was cleared meanwhile, even if it was registered
                again.
            LeaseLostError: the put's lease expired or was ended.
            InvalidRequestError: the ticket is no longer open.
        """
        if not ticket.open:
            raise InvalidRequestError(
                f"put_samples(partition={ticket.partition_id!r}): the put was aborted before its "
                "commit; put again"
            )
        partition = ticket.partition
        self.check_registered(partition)
        partition.leases.check_token(ticket.token, ticket.sample_ids, partition.rows)
        check_kinds(ticket.kinds, partition.samples.kinds, partition_id=ticket.partition_id)

    def commit_put(
        self,
        ticket: PutTicket,
        cells: Mapping[str, Sequence[Any]] | SharedCells,
        tags: Sequence[Mapping[str, Any]] | None,
        origin: str | None = None,
        *,
        nbytes: Mapping[str, int] | None = None,
    ) -> None:
        """Make a put visible atomically.

        Args:
            ticket: from `begin_put`; it is closed, even if this raises.
            cells: field to one cell per sample, or cells that the samples share.
            tags: one mapping per sample that replaces its tags; None keeps them.
            origin: name of the put, see `DataPlaneClient.read_origins`.
            nbytes: field to the bytes of its cells, if the store knows them.

        Raises:
            DataPlaneError: as `check_commit`.
        """
        try:
            self.check_commit(ticket)
        except DataPlaneError:
            self.abort_put(ticket)
            raise
        self.retract_put(ticket)
        partition = ticket.partition
        partition.samples.kinds.update(ticket.kinds)
        for name, form in ticket.forms.items():
            partition.samples.forms.setdefault(name, form)  # the first put decides
        written, present, replaced = partition.samples.write(
            *(ticket.sample_ids, cells, self._sequence, origin),
            nbytes=nbytes,
            now=time.monotonic(),
        )
        partition.accept(written, present, tags)
        self.totals["puts"] += 1
        self.totals["samples_put"] += len(written) - len(present)
        if replaced:
            self._discard(replaced)

    def acknowledge_put(self, ticket: PutTicket) -> tuple[str, list[str]]:
        """Acknowledge those samples of a committed put that its claim still holds.

        Returns:
            The claim's task, and the acknowledged samples.
        """
        leases = ticket.partition.leases
        lease = leases[ticket.token or ""]
        held = [each for each in ticket.sample_ids if each in lease.rows]
        ticket.partition.acknowledge(lease.token, held)
        return lease.task.name, held

    def abort_put(self, ticket: PutTicket) -> None:
        """Undo the reservations of `begin_put`; idempotent."""
        if ticket.open:
            self.totals["puts_aborted"] += 1
            self.retract_put(ticket)

    def retract_put(self, ticket: PutTicket) -> None:
        """Undo the reservations of `begin_put`, for example because the put begins again later."""
        ticket.open = False
        partition = ticket.partition
        for sample_id in ticket.reserved:
            users = partition.reserved.get(sample_id, 0)
            if users > 1:
                partition.reserved[sample_id] = users - 1
            elif users:
                del partition.reserved[sample_id]
        for name, kind in ticket.kinds.items():
            kinds = partition.pending_kinds.get(name, [])
            if kind in kinds:
                kinds.remove(kind)
            if not kinds:
                partition.pending_kinds.pop(name, None)
        partition.touch()

    def clear(
        self,
        partition_id: str,
        sample_ids: Sequence[str] | None,
        *,
        force: bool,
        withdrawn: bool = False,
    ) -> list[Row]:
        """Drop samples, or with None the partition; return the dropped rows.

        Args:
            partition_id: the partition; nothing is dropped if it is not registered.
            sample_ids: samples to drop; unknown ids are ignored.
            force: drop leased samples too.
            withdrawn: count the samples as never put, so that claims wait for replacements.

        Raises:
            SamplesLeasedError: a sample is leased and ``force`` is not set; nothing is dropped.
        """
        partition = self.partitions.get(partition_id)
        if partition is None:
            return []
        if partition.leases and not force:
            ids = sample_ids or ()
            named = [row for each in ids if (row := partition.rows.get(each)) is not None]
            held = None if sample_ids is None else named
            partition.leases.refuse_leased(held)
        rows = partition.drop(list(partition.rows) if sample_ids is None else sample_ids)
        if withdrawn:
            partition.put_total -= len(rows)
        if sample_ids is None:
            del self.partitions[partition_id]
        self.totals["clears"] += 1
        self.totals["samples_cleared"] += len(rows)
        self._discard(cells_of(row for row in rows if not row.pins))
        return rows

    def detach(self, partition_id: str, *, force: bool) -> Partition | None:
        """Remove a partition at once, as `clear` does, but leave its samples to `dismantle`.

        Returns:
            The partition; None if it is not registered.

        Raises:
            SamplesLeasedError: as `clear`.
        """
        partition = self.partitions.get(partition_id)
        if partition is None:
            return None
        if not force:
            partition.leases.refuse_leased()
        del self.partitions[partition_id]
        self.totals["clears"] += 1
        self.totals["samples_cleared"] += len(partition.rows)
        return partition

    def dismantle(self, partition: Partition, count: int) -> list[Row]:
        """Drop up to ``count`` samples of a detached partition; return their rows."""
        rows = partition.dismantle(count)
        self._discard(cells_of(row for row in rows if not row.pins))
        return rows

    @staticmethod
    def pin(rows: Iterable[Row]) -> None:
        """Keep the rows' cells until `unpin`, even if they are cleared or overwritten."""
        for row in rows:
            row.pins += 1

    def unpin(self, rows: Iterable[Row]) -> None:
        """End a read; discard the cells that were retained only for it."""
        unused: list[Any] = []
        dropped: list[Row] = []
        for row in rows:
            row.pins -= 1
            if row.pins == 0:
                unused += row.stale
                row.stale = ()
                if row.dropped:
                    dropped.append(row)
        unused += cells_of(dropped)
        if unused:
            self._discard(unused)

    def expire(self, now: float) -> list[Partition]:
        """End expired leases and assignments; return the partitions that had any."""
        return [partition for partition in self.partitions.values() if partition.expire(now)]

    def close(self) -> None:
        """Drop everything, and break the reference cycles between rows and claims."""
        for partition in self.partitions.values():
            for lease in partition.leases.values():
                lease.rows.clear()
            for task in partition.tasks.values():
                for assignment in task.assignments:
                    assignment.rows.clear()
        self.partitions.clear()

    def next_expiry(self) -> float | None:
        """Return when to call `expire` next; None if never. See `Partition.next_expiry`."""
        moments = [partition.next_expiry() for partition in self.partitions.values()]
        return min((moment for moment in moments if moment is not None), default=None)
