"""A restore: rows of a checkpoint get memory, keep their cells, and belong to samples again."""

from __future__ import annotations

from dataplane_core import CapacityExceeded, DataPlaneError, InvalidRequestError
from dataplane_core.declaration import PartitionDeclaration
from dataplane_core.ledger import PutTicket
from dataplane_tq.directory import protocol as p
from dataplane_tq.directory.cells import cells_of_put
from dataplane_tq.directory.operations import Operation, State
from dataplane_tq.directory.store_state import StoreState
from dataplane_tq.packed.layout import Block


class Restoring(Operation):
    """Restore under way: capacity and bytes are reserved, and nothing is visible yet."""

    state = State.RESTORING

    def __init__(self, store: StoreState, partition_id: str) -> None:
        self._store = store
        self._partition_id = partition_id
        self._puts: list[tuple[PutTicket, list[Block]]] = []

    def reserve(self, saved: list[p.SavedBlock], node: str) -> list[list[Block]]:
        """Reserve capacity for the blocks; raise a `DataPlaneError` if it is not free now."""
        catalogue, ledger = self._store.catalogue, self._store.ledger
        if catalogue is None:
            raise InvalidRequestError("restore: this store has no packed units")
        puts: dict[tuple[str, ...], dict[str, int]] = {}
        for number, each in enumerate(saved):
            fields = puts.setdefault(tuple(each.sample_ids), {})
            if fields.setdefault(each.layout.name, number) != number:
                raise InvalidRequestError(
                    f"restore(partition={self._partition_id!r}): field {each.layout.name!r} of "
                    f"sample {each.sample_ids[0]!r} is in two blocks"
                )
        answer: list[list[Block]] = [[] for _ in saved]
        for sample_ids, fields in puts.items():
            layouts = [saved[number].layout for number in fields.values()]
            kinds = {layout.name: layout.kind for layout in layouts}
            ticket = ledger.begin_put(self._partition_id, sample_ids, kinds)
            if ticket is None:
                raise ledger.capacity_error(self._partition_id, sample_ids)
            blocks: list[Block] = []
            self._puts.append((ticket, blocks))
            cells = {name: saved[number].cell for name, number in fields.items()}
            placed = catalogue.restore(layouts, cells, preferred_node=node)
            if placed is None:
                raise CapacityExceeded(
                    f"restore(partition={self._partition_id!r}): "
                    f"{sum(layout.nbytes for layout in layouts)} bytes, {catalogue.free_bytes} of "
                    f"{catalogue.capacity} free in pieces of at most {catalogue.largest_free}; "
                    "raise global_segment_size"
                )
            blocks += placed
            for block in placed:
                answer[fields[block.layout.name]].append(block)
        return answer

    def commit(self) -> None:
        """Make the rows visible."""
        catalogue = self._store.catalogue
        assert catalogue is not None
        for ticket, blocks in self._puts:
            cells = cells_of_put(ticket.kinds, blocks, len(ticket.sample_ids))
            self._store.ledger.commit_put(ticket, cells, None)
            rows = [ticket.partition.rows[sample_id] for sample_id in ticket.sample_ids]
            for block in blocks:
                if block.layout.rows == len(rows):
                    catalogue.own(block, rows)
        self._store.changed(self._partition_id)

    def undo(self) -> None:
        for ticket, blocks in self._puts:
            self._store.ledger.abort_put(ticket)
            for block in blocks:
                assert self._store.catalogue is not None
                self._store.catalogue.free_block(block)
        self._store.everything_changed()


def begin_restore(store: StoreState, request: p.BeginRestore) -> tuple[p.RestoreAnswer, Restoring]:
    """Reserve ids, capacity and bytes for saved blocks."""
    if request.partition_id not in store.ledger.partitions:
        store.ledger.register(PartitionDeclaration.checked(request.partition_id, [], 0, []))
    restoring = Restoring(store, request.partition_id)
    try:
        return p.RestoreAnswer(restoring.reserve(request.blocks, request.node)), restoring
    except (DataPlaneError, ValueError):
        restoring.undo()
        raise
