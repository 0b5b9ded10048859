"""`UnitAccess`: one process's reads and writes of fields in the storage units.

The directory decides the location of values. A read's rows must be pinned in the directory until
`UnitAccess.read` returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from tensordict import NonTensorStack

from dataplane_core import UnavailableError
from dataplane_core.tensors.columns import Column
from dataplane_tq.packed.decoding import Piece, decode, decode_column, padded_of
from dataplane_tq.packed.encoding import EncodedField, writes
from dataplane_tq.packed.layout import Block, FieldLayout, FieldParts, Indices
from dataplane_tq.packed.parallel import is_large, run_all
from dataplane_tq.packed.slices import Slices
from dataplane_tq.packed.unit_client import Transport, UnitClient
from dataplane_tq.packed.unit_wire import UnitAddress

T = TypeVar("T")

_ROW_NUMBER_BYTES = np.dtype(np.int64).itemsize


class UnitAccess:
    """Access of one process to all units. Building it does no I/O; threads may share it.

    Args:
        units: name to address.
        token: secret to send to the units.
        transport: see `UnitClient`.
        timeout_s: deadline of each exchange with a unit, in seconds.
        allow_pickle: whether `read` decodes pickles.
    """

    def __init__(
        self,
        units: Mapping[str, UnitAddress],
        token: bytes,
        *,
        transport: Transport,
        timeout_s: float,
        allow_pickle: bool = False,
    ) -> None:
        self._timeout_s = timeout_s
        self._allow_pickle = allow_pickle
        self._units = {
            name: UnitClient(address, token, transport=transport) for name, address in units.items()
        }

    def write(self, blocks: Iterable[Block], fields: Iterable[EncodedField]) -> None:
        """Fill ``blocks``, which the directory placed for ``fields``.

        Raises:
            UnavailableError: a unit is gone.
            DeadlineExceededError: a unit did not confirm its writes in time.
        """
        for unit, to_write in writes(blocks, fields).items():
            self._unit(unit).write(to_write, self._timeout_s)

    def read(
        self, fields: Sequence[str], parts: Sequence[FieldParts]
    ) -> dict[str, torch.Tensor | NonTensorStack]:
        """Return the rows at ``parts`` by field, as copies.

        Raises:
            UnavailableError: a unit is gone.
            DeadlineExceededError: a unit did not answer in time.
        """

        def read(_: str, part: FieldParts) -> torch.Tensor | NonTensorStack:
            return decode(list(self._pieces(part)), allow_pickle=self._allow_pickle)

        return self._each(fields, parts, read)

    def read_columns(
        self,
        fields: Sequence[str],
        parts: Sequence[FieldParts],
        pad_values: Mapping[str, float],
        widths: Mapping[str, int | None],
    ) -> dict[str, Column]:
        """Return the rows as columns padded to ``widths``: see `dataplane_core.tensors.columns`."""
        return self._each(
            fields,
            parts,
            lambda name, part: self._column(part, pad_values.get(name, 0), widths[name]),
        )

    def read_rows(self, block: Block, rows: Indices) -> tuple[FieldLayout, bytes]:
        """Return the layout and the bytes of copies of a block's rows. Raise as `read`."""
        layout, spans = _layout_and_ranges(block, rows)
        unit = self._unit(block.unit)
        return layout, unit.read(spans, self._timeout_s).tobytes() if spans else b""

    def write_saved(self, saved: Iterable[tuple[Iterable[Block], FieldLayout, bytes]]) -> None:
        """Fill blocks that the directory placed for what `read_rows` returned. Raise as `write`."""
        by_unit: dict[str, list[tuple[int, Slices]]] = {}
        for blocks, layout, data in saved:
            slices = Slices(np.frombuffer(data, np.uint8), [0], [len(data)])
            for unit, to_write in writes(blocks, [EncodedField(layout, slices)]).items():
                by_unit.setdefault(unit, []).extend(to_write)
        for unit, to_write in by_unit.items():
            self._unit(unit).write(to_write, self._timeout_s)

    def _each(
        self,
        fields: Sequence[str],
        parts: Sequence[FieldParts],
        read: Callable[[str, FieldParts], T],
    ) -> dict[str, T]:
        """Read each field with ``read``; large TCP reads run in parallel."""
        by_name = dict(zip(fields, parts, strict=True))
        sizes = {name: _estimated_nbytes(part) for name, part in by_name.items()}
        if not is_large(sum(sizes.values())) or self._all_mapped(parts):
            return {name: read(name, part) for name, part in by_name.items()}
        results: dict[str, T] = {}

        def into(name: str) -> None:
            results[name] = read(name, by_name[name])

        # Largest first, so that all connections finish at about the same time.
        run_all(partial(into, name) for name in sorted(fields, key=lambda name: -sizes[name]))
        return {name: results[name] for name in fields}

    def _all_mapped(self, parts: Sequence[FieldParts]) -> bool:
        units = [
            self._unit(name) for name in {block.unit for part in parts for block in part.blocks}
        ]
        for unit in units:
            unit.connect(self._timeout_s)
        return all(unit.zero_copy for unit in units)

    def _column(self, parts: FieldParts, pad_value: float, width: int | None) -> Column:
        block = parts.blocks[0]
        unit = self._unit(block.unit)
        unit.connect(self._timeout_s)
        if width is not None and not parts.source and not unit.zero_copy:
            # Receive the rows directly at their places in the padded tensor.
            layout, spans = _layout_and_ranges(block, _numbers(parts))
            padded = padded_of(layout, pad_value, width)
            if padded is not None:
                starts, stops = layout.row_ranges()
                sizes = (stops - starts).tolist()
                rows = Slices(padded.raw, padded.begins, sizes).views()
                unit.read_into(spans, rows, self._timeout_s)
                return padded.tensor
        return decode_column(list(self._pieces(parts)), pad_value, width)

    def _pieces(self, parts: FieldParts) -> Iterator[Piece]:
        rows = _numbers(parts)
        if not parts.source:
            yield self._piece(parts.blocks[0], rows, None)
            return
        source = np.frombuffer(parts.source, np.int32)
        assert rows is not None
        for number, block in enumerate(parts.blocks):
            positions = np.flatnonzero(source == number)
            yield self._piece(block, rows[positions], positions)

    def _piece(self, block: Block, rows: Indices | None, positions: Indices | None) -> Piece:
        unit = self._unit(block.unit)
        unit.connect(self._timeout_s)
        if unit.zero_copy:
            extent = [(block.offset, block.offset + block.layout.nbytes)]
            return Piece(block.layout, unit.read(extent, self._timeout_s), rows, positions)
        layout, spans = _layout_and_ranges(block, rows)
        return Piece(layout, unit.read(spans, self._timeout_s), None, positions, owned=True)

    def _unit(self, name: str) -> UnitClient:
        unit = self._units.get(name)
        if unit is None:
            raise UnavailableError(f"storage unit {name!r} is not one of {sorted(self._units)}")
        return unit

    def close(self) -> None:
        """Close this process's connections to the units."""
        for unit in self._units.values():
            unit.close()


def _estimated_nbytes(parts: FieldParts) -> int:
    """Estimate the size of the requested rows from the mean size in the first block."""
    first = parts.blocks[0].layout
    if not parts.rows:
        return first.nbytes
    count = len(parts.rows) // _ROW_NUMBER_BYTES
    return first.nbytes * count // max(1, first.rows)


def _numbers(parts: FieldParts) -> Indices | None:
    return np.frombuffer(parts.rows, np.int64) if parts.rows else None


def _layout_and_ranges(
    block: Block, rows: Indices | None
) -> tuple[FieldLayout, list[tuple[int, int]]]:
    """Return the layout of copies of a block's rows, and the rows' byte ranges in the unit."""
    layout, start = block.layout, block.offset
    if rows is None:
        return layout, [(start, start + layout.nbytes)]
    spans = [(start + first, start + last) for first, last in layout.runs(rows)]
    return layout.take(rows), spans
