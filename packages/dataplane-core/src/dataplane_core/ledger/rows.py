"""`Row`: what the ledger knows of one sample."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any  # Any: cells belong to the storage, tags to the caller

from dataplane_core.tags import LENGTH_TAG

GROUP_TAG = "group"
"""Tag that names a sample's group; without it the group is the id up to its last ``_g<number>``."""

NO_ORIGINS: Mapping[str, str] = MappingProxyType({})
"""Of samples that only puts without a name wrote."""


_CHUNK_BITS = 7
"""A chunk has the rows of up to 128 places: work on one takes well below a millisecond."""


class RowChunks:
    """A partition's rows by their places, to visit them bit by bit while others change them."""

    def __init__(self) -> None:
        self._chunks: dict[int, dict[str, Row]] = {}

    def add(self, row: Row) -> None:
        """A row was put."""
        self._chunks.setdefault(row.sequence >> _CHUNK_BITS, {})[row.sample_id] = row

    def discard(self, row: Row) -> None:
        """A row was cleared."""
        number = row.sequence >> _CHUNK_BITS
        chunk = self._chunks[number]
        del chunk[row.sample_id]
        if not chunk:
            del self._chunks[number]

    def __iter__(self) -> Iterator[list[Row]]:
        """The rows chunk by chunk, each as it is when it is reached.

        Every row that stays from the first to the last chunk is visited; what is put meanwhile may
        be left out.
        """
        for number in list(self._chunks):
            chunk = self._chunks.get(number)
            if chunk is not None:
                yield list(chunk.values())


class Row:
    """One sample that was put.

    Attributes:
        sample_id: its id.
        sequence: its place in the order of first puts; never used again for another row.
        cells: field to where the storage keeps the value.
        origins: field to the name of the put that wrote it; shared by the samples of a put, hence
            replaced and never changed.
        tags: the caller's primitives.
        put_at: when it was first put, on the clock of claims; shared by the samples of a put.
        pins: how many reads are under way; what a pinned row held is discarded when the last ends.
        stale: cells that were overwritten while the row was pinned.
        dropped: the row was cleared, and is no longer part of its partition.
    """

    __slots__ = (
        "cells",
        "dropped",
        "origins",
        "pins",
        "put_at",
        "sample_id",
        "sequence",
        "stale",
        "tags",
    )

    def __init__(self, sample_id: str, sequence: int, put_at: float) -> None:
        self.sample_id = sample_id
        self.sequence = sequence
        self.put_at = put_at
        self.cells: dict[str, Any] = {}
        self.origins: Mapping[str, str] = NO_ORIGINS
        self.tags: dict[str, Any] = {}
        self.pins = 0
        self.stale: list[Any] = []
        self.dropped = False

    @property
    def group(self) -> str:
        """The group (one prompt's samples) that the row belongs to."""
        tagged = self.tags.get(GROUP_TAG)
        if tagged is not None:
            return str(tagged)
        head, mark, number = self.sample_id.rpartition("_g")
        return head if mark and number.isdecimal() else self.sample_id

    @property
    def length(self) -> int:
        """Tokens, from the tag ``input_lengths``; 1 without it."""
        value = self.tags.get(LENGTH_TAG, 1)
        return value if isinstance(value, int) else 1
