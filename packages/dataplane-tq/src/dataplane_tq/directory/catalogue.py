"""Location of every row in the storage units: placement, and freeing row by row.

This is pure state without I/O, clock or locks. Only the thread of the directory's event loop calls
it.

Every block takes a multiple of `ALIGNMENT` bytes. The bytes after its last row belong to that row,
so freeing all rows of a put frees exactly what the put allocated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any  # Any: a row's owner is of the caller's type

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from dataplane_core import CapacityExceeded, StorageSummary
from dataplane_tq.directory.allocator import ALIGNMENT, Allocator
from dataplane_tq.packed.layout import Block, FieldLayout
from dataplane_tq.packed.unit_wire import UnitSpec

_SMALL_ROW = 256
"""Mean row size in bytes below which a block's rows are freed together, with its last row."""


class Catalogue:
    """Free and used bytes of several units, and the live rows of each block.

    The owner of a row is the sample whose value the row holds.

    Args:
        units: one or more units with distinct names.
        first_block: number of the first block.
    """

    def __init__(self, units: Sequence[UnitSpec], first_block: int = 0) -> None:
        self._units = {unit.name: unit for unit in units}
        self._memory = {unit.name: Allocator(unit.capacity & -ALIGNMENT) for unit in units}
        # Block id to a mask of its live rows; True if all are alive, as in nearly every block.
        self._alive: dict[int, NDArray[np.bool_] | bool] = {}
        self._owners: dict[int, list[Any]] = {}
        self._next = first_block

    def usage(self) -> list[StorageSummary]:
        """Return the used and free bytes of each unit."""
        return [
            StorageSummary(
                name=name,
                node=self._units[name].node,
                capacity=memory.capacity,
                used=memory.capacity - memory.free_bytes,
                free=memory.free_bytes,
            )
            for name, memory in self._memory.items()
        ]

    def place(
        self, layouts: Sequence[FieldLayout], *, preferred_node: str | None
    ) -> list[Block] | None:
        """Allocate memory for the fields of one put.

        The put gets one extent if a unit has a free extent of its size. Units of
        ``preferred_node`` come first, then units with the most free bytes. Otherwise each field is
        placed separately, and a field that fits into no unit is split into runs of rows.

        Args:
            layouts: layouts of the put's fields.
            preferred_node: node whose units come first; None for no preference.

        Returns:
            Blocks in the order of ``layouts`` and, within a field, of its rows; None if too little
            memory is free now. A field without rows has no block.

        Raises:
            CapacityExceeded: the put would not fit into empty units either.
        """
        sizes = [_padded(layout.nbytes) for layout in layouts]
        self._check_possible(layouts, sizes)
        total = sum(sizes)
        if total > self.free_bytes:
            return None
        for unit in self._preferred(preferred_node):
            offset = self._memory[unit].allocate(total)
            if offset is not None:
                starts = [offset + sum(sizes[:i]) for i in range(len(sizes))]
                return [
                    self._block(unit, start, layout, 0)
                    for start, layout in zip(starts, layouts, strict=True)
                    if layout.rows
                ]
        return self._place_separately(layouts, sizes, preferred_node)

    @property
    def capacity(self) -> int:
        """Size of all units, in bytes."""
        return sum(memory.capacity for memory in self._memory.values())

    @property
    def free_bytes(self) -> int:
        """Free memory of all units, in bytes."""
        return sum(memory.free_bytes for memory in self._memory.values())

    @property
    def largest_free(self) -> int:
        """Size of the largest free extent in any unit, in bytes."""
        return max(memory.largest_free for memory in self._memory.values())

    def _check_possible(self, layouts: Sequence[FieldLayout], sizes: Sequence[int]) -> None:
        if sum(sizes) > self.capacity:
            raise CapacityExceeded(
                f"{sum(sizes)} bytes exceed the {self.capacity} bytes of "
                f"{len(self._units)} storage units; put fewer rows or give the units more memory"
            )
        largest = max(memory.capacity for memory in self._memory.values())
        for layout, size in zip(layouts, sizes, strict=True):
            if size <= largest:
                continue
            starts, stops = layout.row_ranges()
            row = _padded(int((stops - starts).max()))
            if row > largest:
                raise CapacityExceeded(
                    f"field {layout.name!r}: a row of {row} bytes exceeds the largest storage "
                    f"unit, {largest} bytes"
                )

    def _preferred(self, node: str | None) -> list[str]:
        def rank(name: str) -> tuple[bool, int]:
            return self._units[name].node != node, -self._memory[name].free_bytes

        return sorted(self._units, key=rank)

    def _place_separately(
        self, layouts: Sequence[FieldLayout], sizes: Sequence[int], node: str | None
    ) -> list[Block] | None:
        placed: list[list[Block]] = [[] for _ in layouts]
        # Large fields first: they need the large extents.
        for at in sorted(range(len(layouts)), key=lambda at: -sizes[at]):
            blocks = self._place_field(layouts[at], sizes[at], node)
            placed[at] = blocks
            if sum(block.layout.rows for block in blocks) < layouts[at].rows:
                for block in (block for field in placed for block in field):
                    self.free_block(block)
                return None
        return [block for field in placed for block in field]

    def _place_field(self, layout: FieldLayout, size: int, node: str | None) -> list[Block]:
        """Return blocks for as many of the field's rows as fit."""
        if not layout.rows:
            return []
        for unit in self._preferred(node):
            offset = self._memory[unit].allocate(size)
            if offset is not None:
                return [self._block(unit, offset, layout, 0)]
        blocks: list[Block] = []
        starts, stops = layout.row_ranges()
        row = 0
        while row < layout.rows:
            largest = {unit: memory.largest_free for unit, memory in self._memory.items()}
            unit = max(self._preferred(node), key=lambda unit: largest[unit])
            usable = largest[unit] & -ALIGNMENT
            # One past the last row that stops within `usable` bytes of the start of `row`.
            end = int(stops.searchsorted(starts[row] + usable, side="right"))
            if end <= row:
                return blocks
            offset = self._memory[unit].allocate(_padded(int(stops[end - 1] - starts[row])))
            assert offset is not None
            blocks.append(self._block(unit, offset, layout.slice(row, end), row))
            row = end
        return blocks

    def _block(self, unit: str, offset: int, layout: FieldLayout, first_row: int) -> Block:
        block = Block(self._next, unit, offset, layout, first_row, cell=self._next)
        self._next += 1
        self._alive[block.id] = True
        return block

    def restore(
        self, layouts: Sequence[FieldLayout], cells: Mapping[str, int], *, preferred_node: str
    ) -> list[Block] | None:
        """Allocate memory as `place` does, for fields whose cells are those of a checkpoint."""
        self._next = max(self._next, *(cell + 1 for cell in cells.values()))
        blocks = self.place(layouts, preferred_node=preferred_node)
        return blocks and [replace(block, cell=cells[block.layout.name]) for block in blocks]

    def own(self, block: Block, rows: list[Any]) -> None:
        """Record the owners of a block's rows, in row order, for `owners`."""
        self._owners[block.id] = rows

    def disown(self, block: Block) -> None:
        """Forget the owners of a block's rows, because one of the rows has lost its owner."""
        self._owners.pop(block.id, None)

    def owners(self, block: Block) -> list[Any] | None:
        """Return the owners of a block's rows; None once a row has lost its first owner."""
        return self._owners.get(block.id)

    def free(self, cells: Iterable[tuple[Block, int]]) -> None:
        """Free single rows of blocks; all of them or, on an error, none.

        The memory of rows of less than 256 bytes on average is freed with their block's last row.

        Args:
            cells: pairs of a block and the number of a row within it.

        Raises:
            ValueError: a cell is not alive, or occurs twice.
        """
        blocks: dict[int, Block] = {}
        rows: dict[int, list[int]] = {}
        for block, row in cells:
            key = block.id
            if key in rows:
                rows[key].append(row)
            else:
                rows[key] = [row]
                blocks[key] = block
        for key, freed in rows.items():
            self._check_alive(blocks[key], freed)
        ranges: dict[str, list[NDArray[np.int64]]] = {}
        for key, freed in rows.items():
            gone = self._take_rows(blocks[key], freed)
            if gone is not None:
                ranges.setdefault(blocks[key].unit, []).append(gone)
        for unit, parts in ranges.items():
            self._memory[unit].free(np.concatenate(parts))

    def free_block(self, block: Block) -> None:
        """Free the rows of a block that are still alive, as after an abandoned put.

        Raises:
            ValueError: none of its rows is alive.
        """
        alive = self._alive.get(block.id)
        if alive is None:
            raise ValueError(_gone(block))
        if isinstance(alive, bool):
            del self._alive[block.id]
            self.disown(block)
            self._memory[block.unit].free(_extent(block))
        else:
            self.free((block, row) for row in np.flatnonzero(alive).tolist())

    def _check_alive(self, block: Block, rows: list[int]) -> None:
        alive = self._alive.get(block.id)
        if alive is None:
            raise ValueError(_gone(block))
        if min(rows) < 0 or max(rows) >= block.layout.rows:
            raise ValueError(
                f"free: rows {min(rows)}..{max(rows)} of field {block.layout.name!r}; its block "
                f"{block.id} has {block.layout.rows} rows"
            )
        if len(rows) > 1 and len(set(rows)) != len(rows):
            raise ValueError(f"free: a row of {block.layout.name!r} occurs twice")
        if not isinstance(alive, bool) and not alive[rows].all():
            raise ValueError(f"free: a row of {block.layout.name!r} was freed before")

    def _take_rows(self, block: Block, rows: list[int]) -> NDArray[np.int64] | None:
        """Mark rows as gone; return the byte ranges that this frees in the unit, if any."""
        layout = block.layout
        alive = self._alive[block.id]
        self.disown(block)
        if alive is True and len(rows) == layout.rows:
            del self._alive[block.id]
            return _extent(block)
        if isinstance(alive, bool):
            alive = self._alive[block.id] = np.ones(layout.rows, np.bool_)
        alive[rows] = False
        last_gone = not alive.any()
        if last_gone:
            del self._alive[block.id]
        if layout.nbytes < _SMALL_ROW * layout.rows:
            return _extent(block) if last_gone else None
        index = np.sort(np.array(rows, np.int64))
        ranges = np.stack(layout.row_ranges(index), axis=1)
        if index[-1] == layout.rows - 1:
            ranges[-1, 1] = _padded(layout.nbytes)  # the padding belongs to the last row
        ranges += block.offset
        return ranges


def _padded(nbytes: int) -> int:
    return (nbytes + ALIGNMENT - 1) & -ALIGNMENT


def _extent(block: Block) -> NDArray[np.int64]:
    return np.array([(block.offset, block.offset + _padded(block.layout.nbytes))], np.int64)


def _gone(block: Block) -> str:
    return f"free: all rows of block {block.id} of field {block.layout.name!r} were freed before"


def bytes_of(cells: Sequence[tuple[Block, int]]) -> int:
    """Return the size in bytes of distinct rows of blocks."""
    first = cells[0][0]
    if len(cells) == first.layout.rows and [block for block, _ in cells].count(first) == len(cells):
        return first.layout.nbytes
    rows: dict[int, tuple[FieldLayout, list[int]]] = {}
    for block, row in cells:
        block_rows = rows.get(block.id)
        if block_rows is None:
            rows[block.id] = block.layout, [row]
        else:
            block_rows[1].append(row)
    return sum(_bytes_of_rows(layout, numbers) for layout, numbers in rows.values())


def _bytes_of_rows(layout: FieldLayout, rows: list[int]) -> int:
    if len(rows) == layout.rows:
        return layout.nbytes
    if not layout.ends:
        return len(rows) * layout.row_nbytes
    if len(rows) == 1:
        start, stop = layout.row_range(rows[0])
        return stop - start
    starts, stops = layout.row_ranges(rows)
    return int((stops - starts).sum())
