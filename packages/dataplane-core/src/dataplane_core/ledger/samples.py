"""`Samples`: the stored samples of a partition, independent of tasks.

The samples of one put share one mapping of fields to origins, so its memory does not grow with the
samples.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any  # Any: cells belong to the storage

from dataplane_core.declaration import missing_data
from dataplane_core.ledger.cells import Overlay, Place, SharedCells
from dataplane_core.ledger.rows import NO_CELLS, NO_ORIGINS, Row, Rows
from dataplane_core.ledger.sizes import FieldBytes, Measure
from dataplane_core.schema import Form


class Samples:
    """The rows of one partition, and the kinds, forms and sizes of its fields.

    Attributes:
        rows: the rows.
        kinds: field to kind.
        forms: field to form, for fields that have one.
        field_counts: field to the number of samples that have it.
        sizes: bytes by field.
    """

    def __init__(self, partition_id: str, measure: Measure | None) -> None:
        self._partition_id = partition_id
        self.rows = Rows()
        self.kinds: dict[str, str] = {}
        self.forms: dict[str, Form] = {}
        self.field_counts: dict[str, int] = {}
        self.sizes = FieldBytes(measure)
        self._has_origins = False

    def write(
        self,
        sample_ids: Sequence[str],
        cells: Mapping[str, Sequence[Any]] | SharedCells,
        sequence: Iterator[int],
        origin: str | None,
        *,
        nbytes: Mapping[str, int] | None,
        now: float,
    ) -> tuple[list[Row], list[Row], list[Any]]:
        """Write fields of samples.

        Args:
            sample_ids: the samples.
            cells: field to one cell per sample, or cells that the samples share.
            sequence: yields the sequences of new samples.
            origin: name of the put, or None.
            nbytes: field to the bytes of ``cells``, if the store knows them.
            now: time of the put.

        Returns:
            The written rows, those of them that existed before, and cells that can be discarded.
        """
        names, by_sample = _by_sample(cells)
        replaced: list[Any] = []
        written: list[Row] = []
        known = [self.rows.get(sample_id) for sample_id in sample_ids]
        present = [row for row in known if row is not None]
        new: dict[str, Row] = {}
        overlay = Overlay()
        if present:
            self._forget_bytes(present, [name for name in names if self.field_counts.get(name)])
        for sample_id, row, (values, place) in zip(sample_ids, known, by_sample, strict=False):
            if row is None:
                row = new[sample_id] = Row(sample_id, next(sequence), now)
                row.cells, row.place = values, place
            else:
                replaced += self._overwrite(row, values, place, overlay)
            written.append(row)
        for row in new.values():
            self.rows.add(row)
        if nbytes is not None:
            self.sizes.add(nbytes)
        if origin is not None or self._has_origins:
            self._has_origins = True
            note_origin(written, names, origin)
        for name in names:
            self.field_counts[name] = self.field_counts.get(name, 0) + len(new)
        return written, present, replaced

    def _forget_bytes(self, rows: Sequence[Row], fields: Iterable[str]) -> None:
        """Subtract the bytes of cells that are about to be replaced or removed."""
        if self.sizes.is_measured:
            for name in fields:
                self.sizes.remove(name, [row.cell(name) for row in rows if name in row.cells])

    def _overwrite(
        self, row: Row, cells: Mapping[str, Any], place: Place, overlay: Overlay
    ) -> list[Any]:
        """Write fields of a present sample; return the cells that can be discarded."""
        replaced = []
        for name in cells:
            if name in row.cells:
                replaced.append(row.cell(name))
            else:
                self.field_counts[name] = self.field_counts.get(name, 0) + 1
        row.cells, row.place = overlay.merge(row.cells, row.place, cells, place)
        if row.pins:
            row.stale = [*row.stale, *replaced]
            return []
        return replaced

    def remove(self, rows: Sequence[Row]) -> None:
        """Remove rows that were cleared."""
        for row in rows:
            self.rows.remove(row)
            row.dropped = True
        if self.rows:
            self._forget_bytes(rows, self.field_counts)
            for name in self.field_counts:
                self.field_counts[name] -= sum(name in row.cells for row in rows)
        self.forget_fields_if_empty()

    def forget_fields_if_empty(self) -> None:
        """Let the next put decide the kinds of fields if there are no samples."""
        if not self.rows:
            self.kinds, self.forms, self.field_counts = {}, {}, {}
            self.sizes.forget()

    def lookup(self, sample_ids: Sequence[str], fields: Sequence[str]) -> list[Row]:
        """Return the rows in the order of ``sample_ids``.

        Raises:
            MissingDataError: a sample is not present, or lacks one of ``fields``.
        """
        rows = self.rows
        known = [rows.get(sample_id) for sample_id in sample_ids]
        partial = {name for name in fields if self.field_counts.get(name) != len(rows)}
        present = [row for row in known if row is not None]
        if partial:  # some samples of the partition lack these fields
            present = [row for row in present if partial <= row.cells.keys()]
        if len(present) != len(known):
            raise missing_data(
                self._partition_id,
                sample_ids,
                fields,
                lambda sample_id: rows[sample_id].cells if sample_id in rows else None,
            )
        return present

    def origins(self, sample_ids: Sequence[str], fields: Sequence[str]) -> dict[str, int]:
        """Return the origins of fields; see `DataPlaneClient.read_origins`."""
        known = (self.rows[sample_id] for sample_id in sample_ids if sample_id in self.rows)
        return count_origins(known, fields)


def _by_sample(
    cells: Mapping[str, Sequence[Any]] | SharedCells,
) -> tuple[tuple[str, ...], Iterable[tuple[Mapping[str, Any], Place]]]:
    """Return the fields that a put writes, and the cells and the place of each of its samples."""
    if isinstance(cells, SharedCells):
        return cells.fields, cells.samples
    names = tuple(cells)
    if not names:
        return names, itertools.repeat((NO_CELLS, ()))
    columns = zip(*cells.values(), strict=True)
    return names, ((dict(zip(names, values, strict=True)), ()) for values in columns)


def note_origin(rows: Iterable[Row], fields: Sequence[str], origin: str | None) -> None:
    """Record that the put ``origin`` wrote ``fields`` of ``rows``; None if it has no name."""
    if not fields:
        return
    own = {} if origin is None else dict.fromkeys(fields, origin)
    # Keyed by the id() of the old mapping. The value keeps that mapping alive, so that no new one
    # gets the same id().
    replacements: dict[int, tuple[Mapping[str, str], Mapping[str, str]]] = {}
    for row in rows:
        before = row.origins
        pair = replacements.get(id(before))
        if pair is None:
            others = {name: put for name, put in before.items() if name not in fields}
            pair = replacements[id(before)] = before, {**others, **own} or NO_ORIGINS
        row.origins = pair[1]


def count_origins(rows: Iterable[Row], fields: Sequence[str]) -> dict[str, int]:
    """Return origin to the number of rows in which it wrote one of ``fields``, largest first."""
    mappings = [row.origins for row in rows]
    # Rows share mappings: each distinct one is read once.
    distinct = dict(zip(map(id, mappings), mappings, strict=True))
    rows_of: Counter[str] = Counter()
    for identity, count in Counter(map(id, mappings)).items():
        mapping = distinct[identity]
        for origin in {mapping[name] for name in fields if name in mapping}:
            rows_of[origin] += count
    return dict(rows_of.most_common())
