"""`Row`: the ledger's record of one sample; `Rows`: the rows of a partition."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from types import MappingProxyType
from typing import Any, TypeAlias  # Any: cells belong to the storage, tags to the caller

from dataplane_core.ledger.cells import Place
from dataplane_core.ledger.parted_dict import PartedDict
from dataplane_core.ledger.sequence_set import CHUNK_BITS
from dataplane_core.tags import LENGTH_TAG, group_of

NO_ORIGINS: Mapping[str, str] = MappingProxyType({})
"""Origins of samples whose puts had no origin."""

NO_CELLS: Mapping[str, Any] = {}
"""Cells of samples without fields; never changed."""

NO_TAGS: dict[str, Any] = {}
"""Tags of samples without tags; never changed."""


class NamedTask:
    """A task as rows and leases know it, compared by identity; see `tasks.Task`."""

    name: str


class Holding:
    """Samples that are assigned to a rank, or leased, for one task.

    Attributes:
        rows: the samples, by id; those that are acknowledged, cleared or open again are removed.
    """

    rows: dict[str, Row]


State: TypeAlias = Holding | str
"""State of a sample that is not open: assigned, leased, or acknowledged (a str).

The str is the lease's token; it is empty for a claim without a lease.
"""

NO_STATES: Mapping[NamedTask, State] = {}
"""States of samples that are open to every task; never changed."""


class Row:
    """The record of one sample that was put.

    Attributes:
        sample_id: the sample's id.
        sequence: number in the order of first puts; never reused.
        cells: field to the storage's cell of its value. With a ``place``, field to a column and a
            layer, which other samples share; see `SharedCells`. Never changed in place.
        place: the sample's numbers in shared columns; empty if it shares no cells.
        origins: field to the name of the put that wrote it; shared by the samples of a put, so
            never changed in place.
        tags: the caller's primitives; never changed in place.
        put_at: when it was first put, on the clock of claims.
        states: task to the sample's state for it; without an entry the sample is open. Shared by
            the samples of a claim, so never changed in place.
        pins: number of running reads. Cells that are overwritten or cleared meanwhile are
            discarded when the last read ends.
        stale: cells that were overwritten while the row was pinned.
        dropped: whether the row was cleared, and is no longer part of its partition.
    """

    __slots__ = (
        "cells",
        "dropped",
        "origins",
        "pins",
        "place",
        "put_at",
        "sample_id",
        "sequence",
        "stale",
        "states",
        "tags",
    )

    def __init__(self, sample_id: str, sequence: int, put_at: float) -> None:
        self.sample_id = sample_id
        self.sequence = sequence
        self.put_at = put_at
        self.cells: Mapping[str, Any] = NO_CELLS
        self.place: Place = ()
        self.origins: Mapping[str, str] = NO_ORIGINS
        self.tags: dict[str, Any] = NO_TAGS
        self.states: Mapping[NamedTask, State] = NO_STATES
        self.pins = 0
        self.stale: Sequence[Any] = ()
        self.dropped = False

    def cell(self, name: str) -> Any:
        """Return the storage's cell of a field."""
        cell = self.cells[name]
        return (cell[0], self.place[cell[1]]) if self.place else cell

    @property
    def group(self) -> str:
        """Group (one prompt's samples) to which the row belongs."""
        return group_of(self.sample_id, self.tags)

    @property
    def length(self) -> int:
        """Number of tokens, from the tag ``input_lengths``; 1 without it."""
        value = self.tags.get(LENGTH_TAG, 1)
        return value if isinstance(value, int) else 1


def cells_of(rows: Iterable[Row]) -> list[Any]:
    """Return the storage's cells of all fields of rows, in any order."""
    cells: list[Any] = []
    shared: dict[int, tuple[Mapping[str, Any], list[Place]]] = {}  # by id() of the mapping
    for row in rows:
        if not row.place:
            cells += row.cells.values()
        elif (group := shared.get(id(row.cells))) is None:
            shared[id(row.cells)] = row.cells, [row.place]
        else:
            group[1].append(row.place)
    for mapping, places in shared.values():
        for column, layer in mapping.values():
            cells += [(column, place[layer]) for place in places]
    return cells


class Rows(PartedDict[str, Row]):
    """A partition's rows, by id and in chunks by sequence.

    Rows may change while `in_chunks` iterates, but not during any other iteration.

    The order is that of first puts. A chunk has the rows of 128 sequences. Empty chunks are
    removed, so that iteration skips cleared ranges::

        sequences 0..299, of which 128..255 were cleared:   chunks  {0: {0: a, ..., 127: b},
                                                                     2: {256: c, ..., 299: d}}

    Attributes:
        chunks: chunk number to its rows by sequence, both in the order of first puts.
    """

    __slots__ = ("chunks",)

    def __init__(self) -> None:
        super().__init__()
        self.chunks: dict[int, dict[int, Row]] = {}

    def __iter__(self) -> Iterator[str]:
        return (row.sample_id for chunk in self.chunks.values() for row in chunk.values())

    def add(self, row: Row) -> None:
        """Add a row, whose sequence is larger than any other."""
        self[row.sample_id] = row
        chunk = self.chunks.get(row.sequence >> CHUNK_BITS)
        if chunk is None:
            chunk = self.chunks[row.sequence >> CHUNK_BITS] = {}
        chunk[row.sequence] = row

    def remove(self, row: Row) -> None:
        """Remove a row."""
        del self[row.sample_id]
        number = row.sequence >> CHUNK_BITS
        chunk = self.chunks[number]
        del chunk[row.sequence]
        if not chunk:
            del self.chunks[number]

    def at(self, sequence: int) -> Row:
        """Return the row with this sequence."""
        return self.chunks[sequence >> CHUNK_BITS][sequence]

    def in_chunks(self) -> Iterator[list[Row]]:
        """Yield the rows chunk by chunk, each chunk as it is when it is reached.

        Every row that is present throughout is visited; rows put meanwhile may be missed.
        """
        for number in list(self.chunks):
            chunk = self.chunks.get(number)
            if chunk is not None:
                yield list(chunk.values())

    def page(self, start: int, limit: int) -> list[Row]:
        """Return up to ``limit`` rows from position ``start`` on, in the order of first puts."""
        chunks = iter(self.chunks.values())
        for chunk in chunks:
            if start < len(chunk):
                rest = chain(chunk.values(), *(each.values() for each in islice(chunks, limit)))
                return list(islice(rest, start, start + limit))
            start -= len(chunk)
        return []
