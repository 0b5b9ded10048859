"""`Ledger`: all partitions of a store, the room they share, and the puts under way."""

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
from dataplane_core.ledger.order import ClaimOrder
from dataplane_core.ledger.partition import PartitionBook
from dataplane_core.ledger.rows import Row
from dataplane_core.ledger.sizes import Measure
from dataplane_core.schema import Form

TOTALS = (
    "puts",
    "puts_aborted",
    "samples_put",
    "claims",
    "samples_claimed",
    "leases_expired",
    "samples_redelivered",
    "samples_acknowledged",
    "samples_released",
    "clears",
    "samples_cleared",
)
"""What `Ledger.totals` counts."""


@dataclass(eq=False)
class PutTicket:
    """A put that was admitted and is not committed yet.

    Attributes:
        partition: where it goes; not another that is registered under the same name later.
        sample_ids: the samples it writes.
        reserved: those of them that it holds room for, because they are new.
        kinds: field to kind.
        token: the lease under which it writes, if it named one.
        forms: field to form, for those that have one.
    """

    partition: PartitionBook
    sample_ids: list[str]
    reserved: list[str]
    kinds: dict[str, str]
    token: str | None = None
    open: bool = True
    forms: dict[str, Form] = field(default_factory=dict)

    @property
    def partition_id(self) -> str:
        """The partition's name."""
        return self.partition.declaration.partition_id


class Ledger:
    """The books of one store.

    Args:
        capacity: samples that all partitions together may hold; None is no limit.
        discard: called with the cells that nothing refers to any more.
        order: of claims without a seed; None is the order of first puts.
        measure: bytes of cells of one field; None if the store cannot tell.

    Attributes:
        totals: what happened since the store was made, see `TOTALS`; never decreases.
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
        self.partitions: dict[str, PartitionBook] = {}
        self._discard = discard
        self._sequence = itertools.count()
        # One each for all partitions, so that one that is registered again does not begin anew.
        self._revisions = itertools.count(1)
        self._fence = itertools.count(1)

    @property
    def held(self) -> int:
        """Samples that take room, in all partitions."""
        return sum(partition.held for partition in self.partitions.values())

    def register(self, declaration: PartitionDeclaration) -> None:
        """Declare a partition, or replace its declaration."""
        partition = self.partitions.get(declaration.partition_id)
        if partition is None:
            book = PartitionBook(
                declaration,
                self._order,
                self.totals,
                self._measure,
                self._revisions,
                self._fence,
            )
            self.partitions[declaration.partition_id] = book
        else:
            partition.redeclare(declaration)

    def partition(self, partition_id: str) -> PartitionBook:
        """The partition, or `PartitionNotFoundError` naming the registered ones."""
        partition = self.partitions.get(partition_id)
        if partition is None:
            raise PartitionNotFoundError(
                f"partition {partition_id!r} is not registered; registered: "
                f"{listed(sorted(self.partitions)) or 'none'}"
            )
        return partition

    def check_registered(self, partition: PartitionBook) -> None:
        """Raise `PartitionNotFoundError` if it was cleared, also if its name was registered again.

        For a put that began with ``partition`` and had to wait.
        """
        partition_id = partition.declaration.partition_id
        if self.partition(partition_id) is not partition:
            raise PartitionNotFoundError(
                f"put_samples(partition={partition_id!r}): the partition was cleared and "
                "registered again since the put began; put again if its samples belong to the new "
                "one"
            )

    def begin_put(
        self,
        partition_id: str,
        sample_ids: Sequence[str],
        kinds: Mapping[str, str],
        token: str | None = None,
        forms: Mapping[str, Form] | None = None,
    ) -> PutTicket | None:
        """Admit a put: room for its new samples is reserved, its fields' kinds are fixed.

        Returns:
            The ticket to `commit_put` or `abort_put`; None if there is no room now.

        Raises:
            PartitionNotFoundError, SchemaMismatchError, LeaseLostError: at once.
            CapacityExceeded: more samples than the store can ever hold.
        """
        partition = self.partition(partition_id)
        partition.check_token(token, sample_ids)
        check_kinds(kinds, partition.kinds, partition_id=partition_id)
        pending = {name: users[0] for name, users in partition.pending_kinds.items()}
        check_kinds(kinds, pending, partition_id=partition_id)
        new = [sample_id for sample_id in sample_ids if sample_id not in partition.rows]
        room = sum(sample_id not in partition.reserved for sample_id in new)
        if self.capacity is not None and self.held + room > self.capacity:
            if room > self.capacity:
                raise self.full(partition_id, sample_ids)
            return None
        for sample_id in new:
            partition.reserved[sample_id] = partition.reserved.get(sample_id, 0) + 1
        for name, kind in kinds.items():
            partition.pending_kinds.setdefault(name, []).append(kind)
        partition.touch()
        return PutTicket(
            partition, list(sample_ids), new, dict(kinds), token, forms=dict(forms or {})
        )

    def full(self, partition_id: str, sample_ids: Iterable[str]) -> CapacityExceeded:
        """The error of a put that found no room."""
        partition = self.partition(partition_id)
        known = partition.rows.keys() | partition.reserved.keys()
        return capacity_exceeded(
            partition_id,
            new=sum(sample_id not in known for sample_id in sample_ids),
            held=self.held,
            capacity=self.capacity or 0,
        )

    def check_commit(self, ticket: PutTicket) -> None:
        """Raise what `commit_put` would; if it does not, `commit_put` at once does not either.

        Raises:
            PartitionNotFoundError: the partition was cleared meanwhile, also if it was registered
                again.
            LeaseLostError: the lease that the put named has ended.
            InvalidRequestError: the ticket is no longer open.
        """
        if not ticket.open:
            raise InvalidRequestError(
                f"put_samples(partition={ticket.partition_id!r}): the put took too long and was "
                "given up; put again"
            )
        partition = ticket.partition
        self.check_registered(partition)
        partition.check_token(ticket.token, ticket.sample_ids)
        check_kinds(ticket.kinds, partition.kinds, partition_id=ticket.partition_id)

    def commit_put(
        self,
        ticket: PutTicket,
        cells: Mapping[str, Sequence[Any]],
        tags: Sequence[Mapping[str, Any]] | None,
        origin: str | None = None,
        *,
        nbytes: Mapping[str, int] | None = None,
    ) -> None:
        """Make a put visible, all of it at once.

        Args:
            ticket: of `begin_put`; it ends here, also when this raises.
            cells: field to one cell per sample.
            tags: one mapping per sample, replacing its tags; None keeps them.
            origin: names the put, see `DataPlaneClient.read_origins`.
            nbytes: field to the bytes of its cells, if the store can tell.

        Raises:
            DataPlaneError: as `check_commit`.
        """
        try:
            self.check_commit(ticket)
        except DataPlaneError:
            self.abort_put(ticket)
            raise
        self._end_put(ticket)
        partition = ticket.partition
        partition.kinds.update(ticket.kinds)
        for name, form in ticket.forms.items():
            partition.forms.setdefault(name, form)  # the first stands for every later batch
        replaced = partition.write(
            ticket.sample_ids,
            cells,
            tags,
            self._sequence,
            origin,
            nbytes=nbytes,
            now=time.monotonic(),
        )
        partition.touch()
        self.totals["puts"] += 1
        self.totals["samples_put"] += len(ticket.reserved)
        if replaced:
            self._discard(replaced)

    def abort_put(self, ticket: PutTicket) -> None:
        """Give back what `begin_put` reserved; a second time does nothing."""
        if ticket.open:
            self.totals["puts_aborted"] += 1
            self._end_put(ticket)

    def _end_put(self, ticket: PutTicket) -> None:
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
        """Drop samples, or with None the partition; returns the rows that were there.

        Args:
            partition_id: one that is not registered has no samples.
            sample_ids: unknown ones are passed over.
            force: also what is leased.
            withdrawn: they count as never put, and are still to come.

        Raises:
            SamplesLeasedError: one is leased and ``force`` is not set; nothing is dropped.
        """
        partition = self.partitions.get(partition_id)
        if partition is None:
            return []
        if not force:
            partition.refuse_leased(sample_ids)
        rows = partition.drop(list(partition.rows) if sample_ids is None else sample_ids)
        if withdrawn:
            partition.put_total -= len(rows)
        if sample_ids is None:
            del self.partitions[partition_id]
        self.totals["clears"] += 1
        self.totals["samples_cleared"] += len(rows)
        self._discard([cell for row in rows if not row.pins for cell in row.cells.values()])
        return rows

    def detach(self, partition_id: str, *, force: bool) -> PartitionBook | None:
        """Forget a partition at once, as `clear` does; its samples are left to `dismantle`.

        Returns:
            The partition; None if it is not registered.

        Raises:
            SamplesLeasedError: as `clear`.
        """
        partition = self.partitions.get(partition_id)
        if partition is None:
            return None
        if not force:
            partition.refuse_leased()
        del self.partitions[partition_id]
        self.totals["clears"] += 1
        self.totals["samples_cleared"] += len(partition.rows)
        return partition

    def dismantle(self, partition: PartitionBook, count: int) -> list[Row]:
        """Drop up to ``count`` samples of a detached partition; returns their rows."""
        rows = partition.dismantle(count)
        self._discard([cell for row in rows if not row.pins for cell in row.cells.values()])
        return rows

    @staticmethod
    def pin(rows: Iterable[Row]) -> None:
        """Keep what the rows hold until `unpin`, whatever is cleared or overwritten."""
        for row in rows:
            row.pins += 1

    def unpin(self, rows: Iterable[Row]) -> None:
        """End a read; what was kept only for it is discarded."""
        over: list[Any] = []
        for row in rows:
            row.pins -= 1
            if row.pins == 0:
                over += row.stale
                row.stale = []
                if row.dropped:
                    over += row.cells.values()
        if over:
            self._discard(over)

    def expire(self, now: float) -> list[PartitionBook]:
        """End the leases whose time is over; the partitions where that happened."""
        return [partition for partition in self.partitions.values() if partition.expire(now)]

    def next_expiry(self) -> float | None:
        """When the next lease of any partition ends."""
        moments = [partition.next_expiry() for partition in self.partitions.values()]
        return min((moment for moment in moments if moment is not None), default=None)
