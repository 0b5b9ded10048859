"""A clear: the directory drops samples at once, the client drops their rows page by page."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence

from dataplane_core import DataPlaneError, MissingDataError
from dataplane_core.errors import listed
from dataplane_core.ledger import Partition
from dataplane_tq.directory import protocol as p
from dataplane_tq.directory.backlog import grouped
from dataplane_tq.directory.cells import match_cells
from dataplane_tq.directory.operations import Drops, Operation, State
from dataplane_tq.directory.store_state import DISMANTLED_AT_ONCE, StoreState

_PAGE = 1024
"""Maximum number of samples in one answer; the client drops them in TransferQueue."""


class Clearing(Operation):
    """Clear under way: the directory dropped the samples, but TransferQueue still has the rows.

    The client drops those rows. A request without sample ids clears the partition.

    Raises:
        DataPlaneError: the samples cannot be cleared; none of them was cleared.
    """

    state = State.CLEARING

    def __init__(self, store: StoreState, request: p.Clear) -> None:
        store.expire()
        self._store = store
        self._partition_id = request.partition_id
        self._timeout_s = request.timeout_s
        self._held: set[str] = set()
        self._dismantling: Partition | None = None
        self._closing = request.sample_ids is None
        backlog = store.backlog[request.partition_id]
        try:
            if request.sample_ids is None:
                # The partition disappears at once; its rows are dropped page by page.
                self._dismantling = store.ledger.detach(request.partition_id, force=request.force)
                self.dropped = 0 if self._dismantling is None else len(self._dismantling.rows)
                # Puts are blocked until TransferQueue has dropped the partition as well.
                backlog.closing += 1
            else:
                _check_cells(store, request.partition_id, request.sample_ids, request.cells)
                rows = store.ledger.clear(
                    request.partition_id,
                    request.sample_ids,
                    force=request.force,
                    withdrawn=request.withdrawn,
                )
                self.dropped = len(rows)
                backlog.drop(rows, self._held)
        except DataPlaneError:
            store.tidy(request.partition_id)
            raise
        self._drops = Drops(store, request.partition_id, {})
        store.everything_changed()

    async def next_page(self, dropped: int = 0) -> p.ClearAnswer:
        """Return the next page of orphans; the client has dropped those of the page before."""
        backlog = self._store.backlog[self._partition_id]
        backlog.dropping.difference_update(self._drops.samples)
        self._drops = Drops(self._store, self._partition_id, {})
        for _ in range(_PAGE // DISMANTLED_AT_ONCE):
            if self._dismantling is None:
                break
            rows = self._store.ledger.dismantle(self._dismantling, DISMANTLED_AT_ONCE)
            backlog.drop(rows, self._held)
            if not rows:
                self._dismantling = None
            await asyncio.sleep(0)  # serve other connections
        if self._dismantling is None:
            await self._wait_for_reads()
        samples = backlog.take(limit=_PAGE)
        self._drops = Drops(self._store, self._partition_id, samples)
        more = self._dismantling is not None or bool(backlog.orphans)
        return p.ClearAnswer(dropped, grouped(samples), more)

    async def _wait_for_reads(self) -> None:
        """Wait until the reads of cleared samples end, or the timeout expires."""
        pinned = self._store.backlog[self._partition_id].pinned
        deadline = time.monotonic() + self._timeout_s
        while any(pinned[i].pins for i in self._held & pinned.keys()):
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                break  # the read keeps its rows; a later clear drops them
            await self._store.wait(self._partition_id, remaining)
            self._store.check_failure()

    def end(self) -> None:
        """Finish the clear, after TransferQueue has dropped everything."""
        if self._closing:
            self._store.backlog[self._partition_id].closing -= 1
        self._drops.end()

    def undo(self) -> None:
        if self._dismantling is not None:
            self._store.dismantle(self._partition_id, self._dismantling)  # decrements `closing`
        elif self._closing:
            self._store.backlog[self._partition_id].closing -= 1
        self._drops.undo()


def _check_cells(
    store: StoreState, partition_id: str, sample_ids: Sequence[str], cells: Mapping[str, bytes]
) -> None:
    """Raise a `MissingDataError` if an existing sample has none of its cells: see `match_cells`."""
    partition = store.ledger.partitions.get(partition_id)
    if partition is None or not cells:
        return
    rows = [partition.rows.get(sample_id) for sample_id in sample_ids]
    matches = zip(rows, match_cells(rows, cells), strict=True)
    stale = [row.sample_id for row, matched in matches if row is not None and not matched]
    if stale:
        raise MissingDataError(
            f"clear(partition={partition_id!r}): the meta is stale: {len(stale)} of {len(rows)} "
            f"rows were overwritten or reused: {listed(stale)}; get the meta again",
            sample_ids=stale,
        )
