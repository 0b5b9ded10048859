"""Cells of the samples in the storage units: a cell is a block and the number of a row in it.

The samples of a put share their cells: `dataplane_core.ledger.cells` has an example, and says what
a layer and a place are. A column there is a block here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, repeat
from typing import Any

import numpy as np

from dataplane_core.ledger import Row, SharedCells
from dataplane_tq.packed.layout import Block

_Shared = tuple[Mapping[str, Any], tuple[int, ...]]

_PLACES = tuple((row,) for row in range(1024))
"""Places of the first rows of any block, so that they take no memory per sample."""


def cells_of_put(kinds: Mapping[str, str], blocks: Sequence[Block], count: int) -> SharedCells:
    """Return the cells of a put of ``count`` samples; without blocks they are None."""
    if not blocks:
        return SharedCells(tuple(kinds), repeat((dict.fromkeys(kinds), ()), count))
    return SharedCells(tuple(kinds), _cells_in(kinds, blocks, count))


def _cells_in(kinds: Mapping[str, str], blocks: Sequence[Block], count: int) -> Iterator[_Shared]:
    """Yield the shared cells and the place of each sample of a put.

    A field in several blocks divides the samples into runs, within which the blocks are the same::

        sample      0  1  2  3  4  5
        field a     [block 1       ]
        field b     [block 2][block 3]      runs 0..2 and 3..5; sample 4 has the place (4, 1)
    """
    starts = sorted({block.first_row for block in blocks})
    for start, stop in pairwise([*starts, count]):
        run = {
            block.layout.name: block
            for block in blocks
            if block.first_row <= start < block.first_row + block.layout.rows
        }
        firsts = sorted({block.first_row for block in run.values()})
        shared = {name: (run[name], firsts.index(run[name].first_row)) for name in kinds}
        if firsts == [0] and stop <= len(_PLACES):
            yield from zip(repeat(shared), _PLACES[start:stop])
        else:
            for row in range(start, stop):
                yield shared, tuple(row - first for first in firsts)


def match_cells(rows: Sequence[Row | None], cells: Mapping[str, bytes]) -> list[bool]:
    """Return for each row whether it still has at least one of its ``cells``.

    A cell is never reused, and a row never loses a field. So a row without any of the cells was
    cleared, and its sample id put again, or all these fields were overwritten.

    Args:
        rows: rows of samples; None, which has no cell, for a sample that does not exist.
        cells: field to an int64 array with a cell for each row.

    Raises:
        ValueError: an array has another size.
    """
    matches = [False] * len(rows)
    for name, column in cells.items():
        known = np.frombuffer(column, np.int64).tolist()
        for i, (row, cell) in enumerate(zip(rows, known, strict=True)):
            if row is not None and not matches[i] and name in row.cells:
                matches[i] = row.cells[name][0].cell == cell
    return matches
