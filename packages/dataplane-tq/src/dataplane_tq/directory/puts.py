"""A put, from its reservation to the report of its rows to TransferQueue."""

from __future__ import annotations

import time
from collections.abc import Sequence

from dataplane_core import (
    CapacityExceeded,
    DataPlaneError,
    DeadlineExceededError,
    InvalidRequestError,
    MissingDataError,
)
from dataplane_core.errors import listed
from dataplane_core.ledger import Partition, PutTicket, Row
from dataplane_tq.directory import protocol as p
from dataplane_tq.directory.backlog import grouped
from dataplane_tq.directory.catalogue import Catalogue
from dataplane_tq.directory.cells import cells_of_put, match_cells
from dataplane_tq.directory.operations import Drops, Idle, Operation, Reading, State
from dataplane_tq.directory.store_state import StoreState
from dataplane_tq.packed.layout import Block

_RECHECK_S = 1.0


class Putting(Operation):
    """Put under way: ids, capacity and bytes are reserved, and nothing is visible yet."""

    state = State.PUTTING

    def __init__(
        self,
        store: StoreState,
        ticket: PutTicket,
        blocks: list[Block],
        drops: Drops,
        expected: Sequence[Row],
        timeout_s: float,
    ) -> None:
        self.timeout_s = timeout_s
        self._expected = expected
        self._store = store
        self._ticket = ticket
        self._blocks = blocks
        self._drops = drops

    def check(self) -> None:
        """Raise a `DataPlaneError` if the put could not be committed now."""
        self._store.expire()
        self._store.ledger.check_commit(self._ticket)

    def is_blocked(self) -> bool:
        """Return True if another put's report must precede this put."""
        backlog = self._store.backlog.get(self._ticket.partition_id)
        return backlog is not None and backlog.blocks_commit(self._ticket.sample_ids)

    async def wait(self, deadline: float) -> None:
        """Wait for a change of the partition, for at most a second; raise after ``deadline``."""
        self._store.check_failure()
        partition_id = self._ticket.partition_id
        if time.monotonic() > deadline:
            raise DeadlineExceededError(
                f"put_samples(partition={partition_id!r}): after {self.timeout_s:g} s, an earlier "
                f"put of the same samples has still not been reported to TransferQueue"
            )
        await self._store.wait(partition_id, _RECHECK_S)

    def check_commit(self, request: p.CommitPut) -> None:
        """Raise a `DataPlaneError` if `commit` would fail."""
        ticket = self._ticket
        self._store.ledger.check_commit(ticket)
        _check_present(ticket.partition_id, self._expected)
        if request.tags is not None and len(request.tags) != len(ticket.sample_ids):
            raise InvalidRequestError(
                f"put_samples(partition={ticket.partition_id!r}): {len(request.tags)} tags "
                f"for {len(ticket.sample_ids)} samples"
            )

    def consumption(self, request: p.CommitPut) -> list[p.Consumption] | None:
        """Return the consumption for the commit's answer; None without ``acknowledge``.

        With ``will_report`` it is empty, because the answer to `Reported` has it.
        """
        if not request.acknowledge:
            return None
        if request.will_report:
            return []
        lease = self._ticket.partition.leases[self._ticket.token or ""]
        held = [each for each in self._ticket.sample_ids if each in lease.rows]
        return [p.Consumption(lease.task.name, held)]

    def commit(self, request: p.CommitPut) -> Operation:
        """Make the put visible in one step that cannot fail; return the next operation."""
        ticket, store = self._ticket, self._store
        partition = store.ledger.partition(ticket.partition_id)
        cells = cells_of_put(ticket.kinds, self._blocks, len(ticket.sample_ids))
        nbytes: dict[str, int] = {}
        for block in self._blocks:
            name = block.layout.name
            nbytes[name] = nbytes.get(name, 0) + block.layout.nbytes
        if store.catalogue is not None:
            _disown(store.catalogue, partition, ticket)
        store.ledger.commit_put(ticket, cells, request.tags, request.origin, nbytes=nbytes)
        rows = [partition.rows[sample_id] for sample_id in ticket.sample_ids]
        if store.catalogue is not None:
            for block in self._blocks:
                if block.layout.rows == len(rows):
                    store.catalogue.own(block, rows)
        consumed = store.ledger.acknowledge_put(ticket) if request.acknowledge else None
        if request.will_report:
            backlog = store.backlog[ticket.partition_id]
            backlog.reporting.update(ticket.sample_ids)
            if consumed is not None:
                backlog.consume(*consumed)
            following: Operation = Reporting(store, ticket, rows, self._drops)
        else:
            self._drops.end()
            following = Idle()
        store.changed(ticket.partition_id)
        return following

    def undo(self) -> None:
        store = self._store
        store.ledger.abort_put(self._ticket)
        if store.catalogue is not None:
            for block in self._blocks:
                store.catalogue.free_block(block)
        else:  # the packed backend reports to TransferQueue only after the commit
            self._leave_orphans()
        self._drops.undo()
        store.everything_changed()

    def _leave_orphans(self) -> None:
        """Remember what the put may have written to TransferQueue."""
        ticket = self._ticket
        partition = self._store.ledger.partitions.get(ticket.partition_id)
        backlog = self._store.backlog[ticket.partition_id]
        # Also check samples that existed when the put began: since then the samples or their
        # partition may have been cleared, and its name may have been registered again.
        for sample_id in ticket.sample_ids:
            exists = partition is not None and (
                sample_id in partition.rows or sample_id in partition.reserved
            )
            if not exists and sample_id not in backlog.pinned:
                backlog.orphans.setdefault(sample_id, tuple(ticket.kinds))


class Reporting(Operation):
    """Report under way: the put is visible, and its client reports the rows to TransferQueue.

    The rows are pinned until the report ends. If they are cleared earlier, they are dropped in
    TransferQueue only after the report, and until then their ids cannot be put again.
    """

    state = State.REPORTING

    def __init__(self, store: StoreState, ticket: PutTicket, rows: list[Row], drops: Drops) -> None:
        self._store = store
        self._ticket = ticket
        self._pins = Reading(store, rows)
        self._drops = drops

    def end(self) -> list[p.Consumption]:
        """Finish the report; return the consumption of the rows in the meantime."""
        consumed = self._unpin()
        self._drops.end()
        return consumed

    def undo(self) -> None:
        self._unpin()
        self._drops.undo()

    def _unpin(self) -> list[p.Consumption]:
        self._pins.undo()
        return self._store.backlog[self._ticket.partition_id].reported(self._ticket.sample_ids)


async def begin_put(store: StoreState, request: p.BeginPut) -> tuple[p.PutAnswer, Putting]:
    """Reserve ids, capacity and bytes for a put, waiting for them up to its timeout."""
    deadline = time.monotonic() + request.timeout_s
    partition = store.ledger.partition(request.partition_id)
    expected = _expected_rows(partition, request)
    while True:
        store.check_failure()
        store.ledger.check_registered(partition)
        _check_present(request.partition_id, expected)
        backlog = store.backlog.get(request.partition_id)
        busy = backlog is not None and backlog.blocks_put(request.sample_ids)
        ticket = None
        if not busy:
            ticket = store.ledger.begin_put(
                request.partition_id,
                request.sample_ids,
                request.kinds,
                request.token,
                request.forms,
            )
        if ticket is not None:
            blocks = _place(store, ticket, request)
            if blocks is not None:
                # An interrupted clear may have left rows of these ids; the client drops them first.
                orphans = {} if backlog is None else backlog.take(request.sample_ids)
                drops = Drops(store, request.partition_id, orphans)
                answer = p.PutAnswer(partition.declaration.enums, blocks, grouped(orphans))
                putting = Putting(store, ticket, blocks, drops, expected, request.timeout_s)
                return answer, putting
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            if busy:
                raise DeadlineExceededError(
                    f"put_samples(partition={request.partition_id!r}): some of the ids were still "
                    f"being cleared or read after {request.timeout_s:g} s"
                )
            if ticket is None:
                raise store.ledger.capacity_error(request.partition_id, request.sample_ids)
            assert store.catalogue is not None
            raise _capacity_error(store.catalogue, request)
        await store.wait(request.partition_id, remaining)


def _expected_rows(partition: Partition, request: p.BeginPut) -> list[Row]:
    """Return the rows that must stay until the commit: those of the request's cells.

    Raises:
        MissingDataError: a sample does not exist, or has none of its cells: see `match_cells`.
    """
    if not request.cells:
        return []
    rows = [partition.rows.get(sample_id) for sample_id in request.sample_ids]
    matches = zip(request.sample_ids, match_cells(rows, request.cells), strict=True)
    stale = [sample_id for sample_id, matched in matches if not matched]
    if stale:
        raise _stale(request.partition_id, stale, len(rows))
    return [row for row in rows if row is not None]


def _check_present(partition_id: str, rows: Sequence[Row]) -> None:
    """Raise a `MissingDataError` if one of the rows was cleared."""
    cleared = [row.sample_id for row in rows if row.dropped]
    if cleared:
        raise _stale(partition_id, cleared, len(rows))


def _stale(partition_id: str, sample_ids: Sequence[str], count: int) -> MissingDataError:
    return MissingDataError(
        f"put(partition={partition_id!r}): the meta is stale: {len(sample_ids)} of {count} rows "
        f"were cleared, overwritten or reused: {listed(sample_ids)}; get the meta again",
        sample_ids=sample_ids,
    )


def _place(store: StoreState, ticket: PutTicket, request: p.BeginPut) -> list[Block] | None:
    """Place the put's bytes; abort its reservation and return None if they do not fit now."""
    blocks: list[Block] | None = []
    if request.layouts:
        assert store.catalogue is not None
        try:
            blocks = store.catalogue.place(request.layouts, preferred_node=request.node)
        except DataPlaneError:
            store.ledger.abort_put(ticket)
            raise
        if blocks is None:
            store.ledger.retract_put(ticket)
    return blocks


def _capacity_error(catalogue: Catalogue, request: p.BeginPut) -> CapacityExceeded:
    wanted = sum(layout.nbytes for layout in request.layouts)
    free = catalogue.free_bytes
    fragmented = (
        f" in pieces of at most {catalogue.largest_free}: the free memory is fragmented"
        if wanted <= free
        else ""
    )
    return CapacityExceeded(
        f"put_samples(partition={request.partition_id!r}): {wanted} bytes, "
        f"{free} of {catalogue.capacity} free{fragmented}; "
        "too little was cleared in time: clear samples or raise global_segment_size"
    )


def _disown(catalogue: Catalogue, partition: Partition, ticket: PutTicket) -> None:
    """Forget the owners of the blocks in which the put overwrites a row."""
    overwritten = [name for name in ticket.kinds if partition.samples.field_counts.get(name)]
    if not overwritten:
        return
    for sample_id in ticket.sample_ids:
        row = partition.rows.get(sample_id)  # also if another put added it after this put began
        if row is not None:
            for name in overwritten:
                if name in row.cells:
                    catalogue.disown(row.cells[name][0])
