"""`FieldLayout`: the position of each row of a field in the field's flat buffer.

A put's rows of one field are stored back to back, and the layout alone locates a row. Every read's
answer contains layouts, so they must be cheap to decode: ``ends`` is one `bytes` object. In a
msgpack list, 512 integers would cost more than the memcpy of the rows. An example::

    rows  "ab" "" "cde"      flat  a b c d e      ends  [2, 2, 5]
                                   0 1 2 3 4 5    row i is flat[ends[i - 1]:ends[i]]

    take([2, 0])   flat  c d e a b    ends  [3, 5]
    runs([2, 0])   [(2, 5), (0, 2)]   ranges of the old buffer that make up the new one
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]

_END = struct.Struct("<q")
_PAIR = struct.Struct("<qq")


class FieldLayout(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Layout of one field's rows in one flat buffer.

    Attributes:
        name: name of the field.
        kind: dtype of its tensors, such as ``torch.int64``, or ``object``.
        ragged: whether ``item`` lacks the rows' first dimension.
        item: shape of a row; if ``ragged``, without its first dimension.
        ends: little-endian int64 array with the end of each row, in bytes; empty if all rows have
            ``row_nbytes``.
        row_nbytes: size of each row; 0 if ``ends`` is set.
        rows: number of rows.
        shapes: shape of each row; only if it does not follow from ``item`` and the row's size.
    """

    name: str
    kind: str
    ragged: bool
    item: tuple[int, ...]
    ends: bytes
    row_nbytes: int
    rows: int
    shapes: list[tuple[int, ...]] | None = None

    def __post_init__(self) -> None:
        if self.rows < 0 or self.row_nbytes < 0:
            raise ValueError(f"{self.name!r}: {self.rows} rows of {self.row_nbytes} bytes")
        if self.shapes is not None and len(self.shapes) != self.rows:
            raise ValueError(f"{self.name!r}: {len(self.shapes)} shapes for {self.rows} rows")
        if self.ends:
            if len(self.ends) != 8 * self.rows:
                raise ValueError(
                    f"{self.name!r}: {len(self.ends)} bytes of ends; expected {8 * self.rows}"
                )
            ends = self._ends()
            if ends[0] < 0 or (ends[1:] < ends[:-1]).any():
                raise ValueError(f"{self.name!r}: ends of rows are not in ascending order")

    def _ends(self) -> Indices:
        return np.frombuffer(self.ends, "<i8")

    @property
    def nbytes(self) -> int:
        """Size of the flat buffer."""
        if self.ends:
            return int(_END.unpack_from(self.ends, len(self.ends) - 8)[0])
        return self.rows * self.row_nbytes

    def row_range(self, row: int) -> tuple[int, int]:
        """Return the start and stop of ``row`` in the flat buffer.

        Raises:
            IndexError: there is no such row.
        """
        if not 0 <= row < self.rows:
            raise IndexError(f"{self.name!r}: row {row} of {self.rows}")
        if not self.ends:
            return row * self.row_nbytes, (row + 1) * self.row_nbytes
        if row == 0:
            return 0, _END.unpack_from(self.ends)[0]
        start, stop = _PAIR.unpack_from(self.ends, 8 * row - 8)
        return start, stop

    def row_ranges(self, rows: Indices | Sequence[int] | None = None) -> tuple[Indices, Indices]:
        """Return the starts and the stops of ``rows`` (default: all rows), as two int64 arrays.

        Raises:
            IndexError: there is no such row.
        """
        if rows is None:
            if self.ends:
                stops = self._ends()
                starts = np.empty_like(stops)
                starts[0] = 0
                starts[1:] = stops[:-1]
                return starts, stops
            starts = np.arange(self.rows, dtype=np.int64) * self.row_nbytes
            return starts, starts + self.row_nbytes
        index = self._checked(rows)
        if self.ends:
            ends = self._ends()
            return np.where(index > 0, ends[index - 1], 0), ends[index]
        return index * self.row_nbytes, (index + 1) * self.row_nbytes

    def _checked(self, rows: Indices | Sequence[int]) -> Indices:
        index = np.asarray(rows, dtype=np.int64)
        if index.size and (index.min() < 0 or index.max() >= self.rows):
            raise IndexError(
                f"{self.name!r}: requested rows {index.min()}..{index.max()} of {self.rows}"
            )
        return index

    def runs(self, rows: Indices | Sequence[int]) -> list[tuple[int, int]]:
        """Return the byte ranges that hold ``rows`` in this order, with adjacent rows merged.

        Concatenated they are the flat buffer of `take`.
        """
        starts, stops = self.row_ranges(rows)
        if not starts.size:
            return []
        breaks = np.flatnonzero(starts[1:] != stops[:-1])
        first = starts[np.concatenate(([0], breaks + 1))]
        last = stops[np.concatenate((breaks, [starts.size - 1]))]
        return [
            pair for pair in zip(first.tolist(), last.tolist(), strict=True) if pair[0] < pair[1]
        ]

    def slice(self, start: int, stop: int) -> FieldLayout:
        """Return the layout of a copy of rows ``start`` to ``stop`` (exclusive)."""
        if not 0 <= start <= stop <= self.rows:
            raise IndexError(f"{self.name!r}: rows {start}..{stop} of {self.rows}")
        if start == 0 and stop == self.rows:
            return self
        ends = b""
        if self.ends and start < stop:
            base = self.row_range(start)[0]
            ends = (self._ends()[start:stop] - base).tobytes()
        return self._with(ends, stop - start, self.shapes and self.shapes[start:stop])

    def take(self, rows: Indices | Sequence[int]) -> FieldLayout:
        """Return the layout of a copy of ``rows``, in this order."""
        index = self._checked(rows)
        ends = b""
        if self.ends and index.size:
            starts, stops = self.row_ranges(index)
            ends = np.cumsum(stops - starts).tobytes()
        shapes = None if self.shapes is None else [self.shapes[row] for row in index.tolist()]
        return self._with(ends, index.size, shapes)

    def _with(self, ends: bytes, rows: int, shapes: list[tuple[int, ...]] | None) -> FieldLayout:
        return FieldLayout(
            self.name, self.kind, self.ragged, self.item, ends, self.row_nbytes, rows, shapes
        )


class Block(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Contiguous run of rows of one field in one unit.

    Attributes:
        id: number of the block, unique in the store.
        unit: name of the unit.
        offset: start of the block in the unit's memory, in bytes.
        layout: layout of these rows; its byte ranges are relative to ``offset``.
        first_row: number of the first row within the put.
        cell: the number that the metas of TransferQueue's clients have: the block's id, or, after a
            restore, the saved cell. So several blocks may have the same cell.
    """

    id: int
    unit: str
    offset: int
    layout: FieldLayout
    first_row: int
    cell: int


class FieldParts(msgspec.Struct, frozen=True, array_like=True):
    """Location of the requested rows of one field.

    Attributes:
        blocks: blocks that hold the rows.
        source: int32 array with each row's index in ``blocks``; empty if there is one block.
        rows: int64 array with each row's number in its block; empty for all rows of the only block,
            in order.
    """

    blocks: list[Block]
    source: bytes
    rows: bytes

    def locate(self) -> tuple[NDArray[np.int32], Indices]:
        """Return each row's index in ``blocks``, and its number in its block."""
        if self.rows:
            numbers = np.frombuffer(self.rows, np.int64)
        else:
            numbers = np.arange(self.blocks[0].layout.rows, dtype=np.int64)
        if self.source:
            return np.frombuffer(self.source, np.int32), numbers
        return np.zeros(len(numbers), np.int32), numbers
