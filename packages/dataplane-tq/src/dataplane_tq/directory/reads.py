"""Lookup of the rows of a read."""

from __future__ import annotations

from typing import Any  # Any: numpy's integers

import numpy as np

from dataplane_core.ledger import Partition, Row
from dataplane_core.ledger.samples import count_origins
from dataplane_tq.directory import protocol as p
from dataplane_tq.directory.catalogue import Catalogue
from dataplane_tq.packed.layout import Block, FieldParts


def find(
    partition: Partition, catalogue: Catalogue | None, request: p.Read
) -> tuple[p.ReadAnswer, list[Row]]:
    """Return the locations of the rows of a read, and the rows to pin.

    Raises:
        MissingDataError: a sample does not exist or lacks a field.
    """
    rows = partition.samples.lookup(request.sample_ids, request.fields)
    kinds = [partition.samples.kinds[name] for name in request.fields] if rows else []
    parts = []
    if catalogue is not None and rows:
        parts = [_parts(rows, name, catalogue) for name in request.fields]
    origins = count_origins(rows, request.fields) if request.origins else {}
    all_forms = partition.samples.forms
    forms = {name: all_forms[name] for name in request.fields if name in all_forms}
    return p.ReadAnswer(kinds, parts, origins, forms), rows


def _parts(rows: list[Row], name: str, catalogue: Catalogue) -> FieldParts:
    """Return the locations of one field of ``rows``; they may be in several blocks."""
    first, layer = rows[0].cells[name]
    start = rows[0].place[layer]
    stop = start + len(rows)
    if (owners := catalogue.owners(first)) is not None and owners[start:stop] == rows:
        # Fast path: the rows are a block, or a run of its rows, in the order of the put.
        complete = len(rows) == first.layout.rows
        run = b"" if complete else np.arange(start, stop, dtype=np.int64).tobytes()
        return FieldParts([first], b"", run)
    cells = [row.cells[name] for row in rows]
    numbers = [row.place[layer] for row, (_, layer) in zip(rows, cells, strict=True)]
    if all(block is first for block, _ in cells):
        complete = len(numbers) == first.layout.rows and numbers == list(range(len(numbers)))
        return FieldParts([first], b"", b"" if complete else _packed(numbers, np.int64))
    places: dict[int, int] = {}
    blocks: list[Block] = []
    source = []
    for block, _ in cells:
        place = places.get(block.id)
        if place is None:
            place = places[block.id] = len(blocks)
            blocks.append(block)
        source.append(place)
    return FieldParts(blocks, _packed(source, np.int32), _packed(numbers, np.int64))


def _packed(values: list[int], dtype: type[np.signedinteger[Any]]) -> bytes:
    return np.array(values, dtype=dtype).tobytes()
