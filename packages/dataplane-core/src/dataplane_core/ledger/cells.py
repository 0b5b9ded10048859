"""`SharedCells`: cells that the samples of a put share, so that a sample costs few bytes.

A store of columns finds a cell by its column and the sample's number in that column. Such a pair
for each sample and field would take more memory than all else in the ledger. Columns that number
their samples alike, such as those of one put, form a layer. So samples share one mapping of field
to column and layer, and each sample has only its place: its number in each layer::

    put 1: a, b of 3 samples      cells {a: (A, 0), b: (B, 0)}                places (0,) (1,) (2,)
    put 2: b, c of the last two   cells {a: (A, 0), b: (B2, 1), c: (C, 1)}    places (1, 0) (2, 1)

Field c of the last sample is number 1 of column C: the place (2, 1) has the number 1 in layer 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias  # Any: cells belong to the storage

Place: TypeAlias = tuple[int, ...]
"""Number of a sample in the columns of each layer; empty if it shares no cells."""


@dataclass(frozen=True)
class SharedCells:
    """Cells of a put, shared by its samples. A store shares the cells of all puts, or of none.

    Attributes:
        fields: the fields that the put writes.
        samples: for each sample of the put the mapping of field to ``(column, layer)``, and the
            sample's place. The mappings are never changed.
    """

    fields: tuple[str, ...]
    samples: Iterable[tuple[Mapping[str, Any], Place]]


class Overlay:
    """The cells of samples after a put that overwrites or adds fields.

    One overlay serves all samples of the put. Samples that shared their cells before share them
    afterwards.
    """

    def __init__(self) -> None:
        # Keyed by the id() of both mappings. The value keeps them alive, so that no new mapping
        # gets the same id().
        self._merged: dict[tuple[int, int], tuple[Any, Any, dict[str, Any], list[int]]] = {}

    def merge(
        self, cells: Mapping[str, Any], place: Place, newer: Mapping[str, Any], newer_place: Place
    ) -> tuple[Mapping[str, Any], Place]:
        """Return cells and place of a sample, with the fields of ``newer`` replaced or added."""
        if not newer:
            return cells, place
        if not newer_place:
            return {**cells, **newer}, ()
        key = id(cells), id(newer)
        entry = self._merged.get(key)
        if entry is None:
            kept = sorted({layer for name, (_, layer) in cells.items() if name not in newer})
            merged = {
                name: (column, kept.index(layer)) if name not in newer else newer[name]
                for name, (column, layer) in cells.items()
            }
            for name, (column, layer) in newer.items():
                merged[name] = column, len(kept) + layer
            entry = self._merged[key] = cells, newer, merged, kept
        return entry[2], (*(place[layer] for layer in entry[3]), *newer_place)
