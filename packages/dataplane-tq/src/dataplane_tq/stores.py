"""Where a client's values go: into packed memory, or through TransferQueue's storage managers.

Both register every row with TransferQueue's controller; they differ in who moves the bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any  # Any: tags, and what a store keeps between encode and write

import numpy as np
from tensordict import NonTensorData, NonTensorStack, TensorDict

from dataplane_core import UnavailableError
from dataplane_core.rows import OBJECT, Column, collate, split_rows
from dataplane_tq import transfer_queue_rows as rows_in
from dataplane_tq.engine import Engine
from dataplane_tq.object_codec import decode_object, encode_object
from dataplane_tq.packed.catalogue import Block
from dataplane_tq.packed.decoding import Piece, decode
from dataplane_tq.packed.encoding import encode, writes
from dataplane_tq.packed.layout import FieldLayout
from dataplane_tq.packed.unit_client import UnitClient
from dataplane_tq.protocol import FieldParts, PutAnswer, ReadAnswer


@dataclass(frozen=True)
class Encoded:
    """A put's values in the form that the store writes.

    Attributes:
        kinds: field to kind.
        values: the store's own.
        layouts: of the fields that the directory places.
    """

    kinds: dict[str, str]
    values: Any = None
    layouts: list[FieldLayout] = field(default_factory=list)


class Store(ABC):
    """One process's way to the values."""

    @abstractmethod
    def encode(self, fields: TensorDict, count: int) -> Encoded:
        """Take a put's values apart, or refuse them with an `InvalidRequestError`."""

    @abstractmethod
    def write(
        self,
        what: str,
        encoded: Encoded,
        where: PutAnswer,
        sample_ids: list[str],
        partition_id: str,
        tags: Sequence[dict[str, Any]] | None,
    ) -> None:
        """Make the values readable by every process, and register the rows."""

    @abstractmethod
    def read(
        self,
        what: str,
        where: ReadAnswer,
        sample_ids: list[str],
        partition_id: str,
        fields: list[str],
    ) -> TensorDict:
        """Values of pinned samples, in the order of ``sample_ids``, in memory of their own."""

    def close(self) -> None:  # noqa: B027  # most stores hold nothing
        """End what this store holds open."""


class TransferQueueStore(Store):
    """Values go through the storage manager of TransferQueue's client."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def encode(self, fields: TensorDict, count: int) -> Encoded:
        columns = split_rows(fields, count)
        stored: dict[str, Any] = {}
        for name, column in columns.items():
            if column.kind == OBJECT:
                # As bytes they pass TransferQueue untouched; it would change some types.
                stored[name] = NonTensorStack(
                    *(NonTensorData(encode_object(name, value)) for value in column.rows)
                )
            else:
                stored[name] = fields.get(name).detach().cpu()
        kinds = {name: column.kind for name, column in columns.items()}
        return Encoded(kinds, TensorDict(stored, batch_size=[count]))

    def write(
        self,
        what: str,
        encoded: Encoded,
        where: PutAnswer,
        sample_ids: list[str],
        partition_id: str,
        tags: Sequence[dict[str, Any]] | None,
    ) -> None:
        client = self._engine.client
        rows = self._engine.run(
            what, rows_in.register, client, sample_ids, partition_id, tags, where.leftovers
        )
        if encoded.kinds:
            self._engine.run(
                what, rows_in.store, client, encoded.values, rows, sample_ids, partition_id, what
            )

    def read(
        self,
        what: str,
        where: ReadAnswer,
        sample_ids: list[str],
        partition_id: str,
        fields: list[str],
    ) -> TensorDict:
        distinct = list(dict.fromkeys(sample_ids))
        names = list(dict.fromkeys(fields))
        answer = self._engine.run(
            what, rows_in.read, self._engine.client, distinct, partition_id, names, what
        )
        places = {sample_id: i for i, sample_id in enumerate(distinct)}
        order = [places[sample_id] for sample_id in sample_ids]
        kinds = dict(zip(fields, where.kinds, strict=True))
        columns: dict[str, Column] = {}
        for name, column in split_rows(answer, len(distinct)).items():
            values = [column.rows[i] for i in order]
            if kinds[name] == OBJECT:
                values = [decode_object(value) for value in values]
            columns[name] = Column(kinds[name], values)
        return collate(columns, len(sample_ids))


class PackedStore(Store):
    """Values lie in the storage units' memory, where this process writes and reads them itself.

    Args:
        engine: for registering rows.
        connection: of the storage backend ``packed``.
    """

    def __init__(self, engine: Engine, connection: dict[str, Any]) -> None:
        self._engine = engine
        self._units = {
            name: UnitClient(address, connection["token"], transport=connection["transport"])
            for name, address in connection["units"].items()
        }

    def encode(self, fields: TensorDict, count: int) -> Encoded:
        encoded = encode(fields, count)
        return Encoded(
            {item.layout.name: item.layout.kind for item in encoded},
            encoded,
            [item.layout for item in encoded],
        )

    def write(
        self,
        what: str,
        encoded: Encoded,
        where: PutAnswer,
        sample_ids: list[str],
        partition_id: str,
        tags: Sequence[dict[str, Any]] | None,
    ) -> None:
        client = self._engine.client
        # The controller answers while the bytes are copied.
        registering = self._engine.submit(
            rows_in.register, client, sample_ids, partition_id, tags, where.leftovers
        )
        for unit, pieces in writes(where.blocks, encoded.values or ()).items():
            self._unit(unit).write(pieces, self._engine.timeout_s)
        rows = self._engine.wait(what, registering)
        if encoded.kinds:
            self._engine.run(what, rows_in.publish, client, rows, partition_id, list(encoded.kinds))

    def read(
        self,
        what: str,
        where: ReadAnswer,
        sample_ids: list[str],
        partition_id: str,
        fields: list[str],
    ) -> TensorDict:
        columns = {
            name: decode(list(self._pieces(parts)))
            for name, parts in zip(fields, where.parts, strict=True)
        }
        return TensorDict(columns, batch_size=[len(sample_ids)])

    def _pieces(self, parts: FieldParts) -> Iterator[Piece]:
        rows = np.frombuffer(parts.rows, np.int64) if parts.rows else None
        if not parts.source:
            yield self._piece(parts.blocks[0], rows, None)
            return
        source = np.frombuffer(parts.source, np.int32)
        assert rows is not None
        for number, block in enumerate(parts.blocks):
            positions = np.flatnonzero(source == number)
            yield self._piece(block, rows[positions], positions)

    def _piece(self, block: Block, rows: Any, positions: Any) -> Piece:
        unit = self._unit(block.unit)
        layout, start = block.layout, block.offset
        unit.connect(self._engine.timeout_s)
        if rows is None or unit.zero_copy:
            spans = [(start, start + layout.nbytes)]
        else:
            spans = [(start + first, start + last) for first, last in layout.runs(rows)]
            layout, rows = layout.take(rows), None
        return Piece(layout, unit.read(spans, self._engine.timeout_s), rows, positions)

    def _unit(self, name: str) -> UnitClient:
        unit = self._units.get(name)
        if unit is None:
            raise UnavailableError(f"storage unit {name!r} is not one of {sorted(self._units)}")
        return unit

    def close(self) -> None:
        for unit in self._units.values():
            unit.close()
