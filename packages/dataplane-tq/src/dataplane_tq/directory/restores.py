"""A restore: blocks of a checkpoint get memory, keep their numbers, and belong to samples again."""

from __future__ import annotations

from dataplane_core import CapacityExceeded, DataPlaneError, InvalidRequestError
from dataplane_core.declaration import PartitionDeclaration
from dataplane_core.ledger import PutTicket
from dataplane_tq.directory import protocol as p
from dataplane_tq.directory.cells import cells_of_restore
from dataplane_tq.directory.operations import Operation, State
from dataplane_tq.directory.store_state import StoreState
from dataplane_tq.packed.layout import Block

_Column = tuple[Block, list[int]]
"""A block, and the number of each sample's row in it."""


class Restoring(Operation):
    """Restore under way: capacity and bytes are reserved, and nothing is visible yet."""

    state = State.RESTORING

    def __init__(self, store: StoreState, partition_id: str) -> None:
        self._store = store
        self._partition_id = partition_id
        self._blocks: list[tuple[Block, list[int]]] = []
        self._puts: list[tuple[PutTicket, dict[str, _Column]]] = []

    def reserve(self, saved: list[p.SavedBlock], node: str) -> list[Block]:
        """Reserve capacity for the blocks; raise a `DataPlaneError` if it is not free now."""
        catalogue = self._store.catalogue
        if catalogue is None:
            raise InvalidRequestError("restore: this store has no packed units")
        columns: dict[tuple[str, ...], dict[str, _Column]] = {}
        for each in saved:
            rows = each.live_rows().tolist()
            block = catalogue.restore(each.id, each.layout, preferred_node=node)
            if block is None:
                raise CapacityExceeded(
                    f"restore(partition={self._partition_id!r}): field {each.layout.name!r} has "
                    f"{each.layout.nbytes} bytes in one block, and the largest free piece has "
                    f"{catalogue.largest_free}; give the units at least the memory that they had "
                    "at the save"
                )
            self._blocks.append((block, rows))
            fields = columns.setdefault(tuple(each.sample_ids), {})
            if each.layout.name in fields:
                raise InvalidRequestError(
                    f"restore(partition={self._partition_id!r}): field {each.layout.name!r} of "
                    f"sample {each.sample_ids[0]!r} is in two blocks"
                )
            fields[each.layout.name] = block, rows
        for sample_ids, fields in columns.items():
            kinds = {name: block.layout.kind for name, (block, _) in fields.items()}
            ticket = self._store.ledger.begin_put(self._partition_id, sample_ids, kinds)
            if ticket is None:
                raise self._store.ledger.capacity_error(self._partition_id, sample_ids)
            self._puts.append((ticket, fields))
        return [block for block, _ in self._blocks]

    def commit(self) -> None:
        """Make the rows visible, and free the memory of the rows that were not saved."""
        catalogue = self._store.catalogue
        assert catalogue is not None
        for ticket, fields in self._puts:
            self._store.ledger.commit_put(ticket, cells_of_restore(fields), None)
            rows = [ticket.partition.rows[sample_id] for sample_id in ticket.sample_ids]
            for block, _ in fields.values():
                if block.layout.rows == len(rows):
                    catalogue.own(block, rows)
        for block, numbers in self._blocks:
            gone = set(range(block.layout.rows)).difference(numbers)
            catalogue.free((block, row) for row in gone)
        self._store.changed(self._partition_id)

    def undo(self) -> None:
        for ticket, _ in self._puts:
            self._store.ledger.abort_put(ticket)
        for block, _ in self._blocks:
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
