"""`PackedStorageManager`: the packed backend's place in TransferQueue's registry of managers.

It serves two kinds of clients. `TQDataPlaneClient` moves its values itself and needs TransferQueue
only to register rows. TransferQueue's own clients, of a queue that ``transfer_queue.init`` started
(`dataplane_tq.packed.bootstrap`), put and get through it: then the config has the key `RAW`.

TransferQueue uses the index of a cleared row again, so an index alone does not say whose row is
meant. A put therefore leaves with the controller where each value lies, its cell, of which there is
never a second one; every meta carries that. A row in which none of the meta's cells is left has
been cleared since, or overwritten as a whole, and the meta is refused.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any  # Any: TransferQueue's metas have no static types

import msgspec
import numpy as np
import ray
import torch
from tensordict import NonTensorStack, TensorDict

from dataplane_core import (
    DeadlineExceededError,
    InvalidRequestError,
    MissingDataError,
    PartitionNotFoundError,
    UnsupportedError,
)
from dataplane_core.boundary import check_put
from dataplane_core.declaration import PartitionDeclaration
from dataplane_core.errors import listed
from dataplane_tq import protocol as p
from dataplane_tq.packed.access import UnitAccess
from dataplane_tq.packed.encoding import encode
from dataplane_tq.packed.layout import Indices
from dataplane_tq.packed.unit_client import Transport
from dataplane_tq.packed.unit_wire import UnitAddress
from dataplane_tq.upstream import (
    AsyncSimpleStorageManager,
    StorageManager,
    StorageManagerFactory,
    extract_field_schema,
)
from dataplane_tq.wire import Address, Link, Session

BACKEND = "PackedStorage"
"""Name in TransferQueue's registries, and of the section in its configuration."""

RAW = "raw"
"""Key of the manager's config that only `dataplane_tq.packed.bootstrap` sets."""

Cells = dict[str, Indices]
"""Field to the cell of each row."""


class RawConnection(msgspec.Struct, frozen=True):
    """What TransferQueue's own clients need to reach the units and the directory.

    It travels in TransferQueue's configuration, and unpickling it imports this module: that is how
    the manager enters the registry of a process that only calls ``transfer_queue.init()``.
    """

    directory: Address
    units: dict[str, UnitAddress]
    token: bytes
    transport: Transport
    timeout_s: float

    def __repr__(self) -> str:
        return f"RawConnection({sorted(self.units)})"  # TransferQueue logs its configuration


class RawStore:
    """Rows of TransferQueue's own clients in the directory and the units. Its methods block.

    A TransferQueue partition is one partition of the directory, registered by its first put; a
    row's sample id is its global index.
    """

    def __init__(self, connection: RawConnection) -> None:
        self.timeout_s = connection.timeout_s
        self._link = Link(connection.directory, timeout_s=connection.timeout_s)
        self._units = UnitAccess(
            connection.units,
            connection.token,
            transport=connection.transport,
            timeout_s=connection.timeout_s,
        )
        self._node = ray.get_runtime_context().get_node_id() if ray.is_initialized() else ""

    def put(
        self, partition_id: str, indexes: Sequence[int], data: TensorDict, meta: Cells
    ) -> Cells:
        """Write the rows' fields; returns their cells.

        Args:
            partition_id: TransferQueue's.
            indexes: of the rows.
            data: their values.
            meta: cells that the caller's meta knows, empty for new rows.

        Raises:
            MissingDataError: the meta is stale.
        """
        sample_ids = [str(index) for index in indexes]
        check_put("put", sample_ids, partition_id)
        if meta:
            with self._link.session(f"put(partition={partition_id!r})") as session:
                self._find(session, partition_id, sample_ids, list(meta), meta)
                session.tell(p.Unpin())
        try:
            return self._put(partition_id, sample_ids, data)
        except PartitionNotFoundError:
            name = _partition(partition_id)
            self._link.ask(
                f"put(partition={partition_id!r})",
                p.Register(PartitionDeclaration.checked(name, [], 0, [])),
                type(None),
            )
            return self._put(partition_id, sample_ids, data)

    def _put(self, partition_id: str, sample_ids: list[str], data: TensorDict) -> Cells:
        encoded = encode(data, len(sample_ids))
        request = p.BeginPut(
            _partition(partition_id),
            sample_ids,
            {field.layout.name: field.layout.kind for field in encoded},
            [field.layout for field in encoded],
            self._node,
            None,
            self.timeout_s,
        )
        with self._link.session(f"put(partition={partition_id!r})") as session:
            where = session.ask(request, p.PutAnswer)
            self._units.write(where.blocks, encoded)
            session.ask(p.CommitPut(None), type(None))
        cells: dict[str, list[Indices]] = {field.layout.name: [] for field in encoded}
        for block in where.blocks:
            rows = np.arange(block.layout.rows, dtype=np.int64)
            cells[block.layout.name].append(_cell(np.int64(block.id), rows))
        return {name: np.concatenate(parts) for name, parts in cells.items()}

    def cells(self, partition_id: str, indexes: Sequence[int], fields: Sequence[str]) -> Cells:
        """Where the values are now.

        Raises:
            MissingDataError, PartitionNotFoundError: a row was cleared, or never had a field.
        """
        sample_ids = [str(index) for index in indexes]
        with self._link.session(f"put(partition={partition_id!r})") as session:
            request = p.Read(_partition(partition_id), sample_ids, list(fields))
            where = session.ask(request, p.ReadAnswer)
            session.tell(p.Unpin())
        return _cells(fields, where)

    def get(
        self, partition_id: str, indexes: Sequence[int], fields: list[str], meta: Cells
    ) -> dict[str, Any]:
        """Values of the rows, by field, in the forms of `_as_transfer_queue`.

        Raises:
            MissingDataError, PartitionNotFoundError: the meta is stale, or a row lacks a field.
        """
        sample_ids = [str(index) for index in indexes]
        with self._link.session(f"get_data(partition={partition_id!r})") as session:
            where = self._find(session, partition_id, sample_ids, fields, meta)
            values = self._units.read(fields, where.parts)
            session.tell(p.Unpin())
        return {name: _as_transfer_queue(column) for name, column in values.items()}

    def clear(self, partition_id: str, indexes: Sequence[int], meta: Cells) -> None:
        """Free rows. Those that are gone are passed over; so are those that lack what the meta
        knows of them, because a row never loses a field: they are another sample's.

        Raises:
            MissingDataError: the meta is stale.
        """
        sample_ids = [str(index) for index in indexes]
        name = _partition(partition_id)
        with self._link.session(f"clear(partition={partition_id!r})") as session:
            if meta:
                try:
                    self._find(session, partition_id, sample_ids, list(meta), meta)
                except PartitionNotFoundError:
                    return
                except MissingDataError as error:
                    if not error.sample_ids:
                        raise
                    others = set(error.sample_ids)
                    kept = [i for i, sample_id in enumerate(sample_ids) if sample_id not in others]
                    sample_ids = [sample_ids[i] for i in kept]
                    meta = {field: cells[kept] for field, cells in meta.items()}
                    self._find(session, partition_id, sample_ids, list(meta), meta)
                session.tell(p.Unpin())
            session.ask(p.Clear(name, sample_ids, True, self.timeout_s), p.ClearAnswer)
            session.ask(p.Dropped(), type(None))

    @staticmethod
    def _find(
        session: Session,
        partition_id: str,
        sample_ids: list[str],
        fields: list[str],
        meta: Cells,
    ) -> p.ReadAnswer:
        """Find and pin rows, if they are those that the meta was given for."""
        where = session.ask(p.Read(_partition(partition_id), sample_ids, fields), p.ReadAnswer)
        now = _cells(fields, where)
        same = np.zeros(len(sample_ids), np.bool_)
        for field in fields:
            if field in meta:
                same |= meta[field] == now[field]
        if not same.all():
            stale = [sample_ids[i] for i in np.flatnonzero(~same)]
            raise MissingDataError(
                f"partition {partition_id!r}: of {len(sample_ids)} rows, {len(stale)} hold other "
                f"values than those that the meta was given for: {listed(stale)}; get the meta "
                "again, after the put"
            )
        return where

    def close(self) -> None:
        """Close this process's connections."""
        self._link.close()
        self._units.close()


@StorageManagerFactory.register(BACKEND)
class PackedStorageManager(StorageManager):
    """Puts, gets and clears for TransferQueue's own clients; for `TQDataPlaneClient` does nothing.

    Args:
        controller_info: TransferQueue's description of the controller's sockets.
        config: with `RAW`, a `RawConnection`, for TransferQueue's own clients.
        zmq_context: the client's; a new one if None.
    """

    def __init__(
        self, controller_info: Any, config: Mapping[str, Any], zmq_context: Any = None
    ) -> None:
        super().__init__(controller_info, config, zmq_context=zmq_context)
        connection = config.get(RAW)
        self._raw = None if connection is None else RawStore(connection)

    async def put_data(
        self, data: TensorDict, metadata: Any, data_parser: Callable[[Any], Any] | None = None
    ) -> None:
        """Store rows, then tell the controller their schema and where each value lies.

        Raises:
            UnsupportedError: (a NotImplementedError) ``data_parser`` is given, or the queue is a
                data plane's.
            InvalidRequestError: rows of several partitions, or values that cannot be stored.
            DataPlaneError: as `RawStore.put`.
        """
        raw = self._served("written")
        if data_parser is not None:
            raise UnsupportedError(f"{BACKEND} does not run a data_parser; parse before the put")
        if metadata.size == 0 or not data.keys():
            return
        partition_ids = set(metadata.partition_ids)
        if len(partition_ids) != 1:
            raise InvalidRequestError(
                f"put_data: rows of the partitions {listed(sorted(partition_ids))}; put each "
                "partition's on its own"
            )
        partition_id, indexes = metadata.partition_ids[0], metadata.global_indexes
        schema = await asyncio.to_thread(extract_field_schema, data)
        known = _known(metadata, range(metadata.size))
        cells = await asyncio.to_thread(raw.put, partition_id, indexes, data, known)
        deadline = time.monotonic() + raw.timeout_s
        while True:
            rows = _by_row(cells)
            located = dict(zip(indexes, rows, strict=True))
            await self.notify_data_update(partition_id, indexes, schema, located)
            # Of two puts to one row, the one told last may not be the one written last.
            try:
                now = await asyncio.to_thread(raw.cells, partition_id, indexes, list(cells))
            except (MissingDataError, PartitionNotFoundError):
                return  # cleared meanwhile, as if after this put
            if all(np.array_equal(now[name], cells[name]) for name in cells):
                break
            if time.monotonic() > deadline:
                raise DeadlineExceededError(
                    f"put(partition={partition_id!r}): overwritten without end by other puts for "
                    f"{raw.timeout_s:g} s"
                )
            cells = now
        for row, cell in zip(metadata._custom_backend_meta, rows, strict=True):
            row.update(cell)

    async def get_data(self, metadata: Any) -> TensorDict:
        """Values of the meta's rows and fields, in the forms of TransferQueue's SimpleStorage.

        Raises:
            UnsupportedError: the queue is a data plane's.
            DataPlaneError: as `RawStore.get`.
        """
        raw = self._served("read")
        fields = list(metadata.field_names)
        if metadata.size == 0 or not fields:
            return TensorDict({}, batch_size=[metadata.size])
        answers = []
        for partition_id, at in _by_partition(metadata).items():
            indexes = [metadata.global_indexes[i] for i in at]
            known = _known(metadata, at)
            answers.append(
                (at, await asyncio.to_thread(raw.get, partition_id, indexes, fields, known))
            )
        columns = answers[0][1] if len(answers) == 1 else _merged(answers, metadata.size)
        return TensorDict(columns, batch_size=[metadata.size])

    async def clear_data(self, metadata: Any) -> None:
        """Free what the meta's rows hold; in a data plane the directory has done it before.

        Raises:
            DataPlaneError: as `RawStore.clear`.
        """
        if self._raw is None:
            return
        for partition_id, at in _by_partition(metadata).items():
            indexes = [metadata.global_indexes[i] for i in at]
            known = _known(metadata, at)
            await asyncio.to_thread(self._raw.clear, partition_id, indexes, known)

    def _served(self, done: str) -> RawStore:
        if self._raw is None:
            raise UnsupportedError(f"this queue is a data plane's: {done} by TQDataPlaneClient")
        return self._raw

    def close(self) -> None:
        """Close every connection."""
        raw = getattr(self, "_raw", None)  # absent if the handshake failed
        if raw is not None:
            raw.close()
        super().close()


def _partition(partition_id: str) -> str:
    return f"tq:{partition_id}"


def _cell(block_ids: Any, rows: Indices) -> Indices:
    """A number for each value: its block, of which there is one ever, and its row in it."""
    cells: Indices = (block_ids << 32) | rows
    return cells


def _cells(fields: Sequence[str], where: p.ReadAnswer) -> Cells:
    cells: Cells = {}
    for name, parts in zip(fields, where.parts, strict=True):
        blocks = np.array([block.id for block in parts.blocks], np.int64)
        if parts.source:
            blocks = blocks[np.frombuffer(parts.source, np.int32)]
        if parts.rows:
            rows = np.frombuffer(parts.rows, np.int64)
        else:
            rows = np.arange(parts.blocks[0].layout.rows, dtype=np.int64)
        cells[name] = _cell(blocks, rows)
    return cells


def _by_row(cells: Cells) -> list[dict[str, int]]:
    columns = [column.tolist() for column in cells.values()]
    return [dict(zip(cells, row, strict=True)) for row in zip(*columns, strict=True)]


def _known(metadata: Any, at: Sequence[int]) -> Cells:
    """The cells that the meta has of all rows ``at``."""
    rows = [metadata._custom_backend_meta[i] for i in at]
    fields = [name for name in rows[0] if all(name in row for row in rows)] if rows else []
    return {name: np.array([row[name] for row in rows], np.int64) for name in fields}


def _by_partition(metadata: Any) -> dict[str, list[int]]:
    """Each partition's rows, by their place in the meta."""
    places: dict[str, list[int]] = {}
    for i, partition_id in enumerate(metadata.partition_ids):
        places.setdefault(partition_id, []).append(i)
    return places


def _as_transfer_queue(column: torch.Tensor | NonTensorStack) -> Any:
    """``column`` in the form of TransferQueue's SimpleStorage.

    Rows of scalars are dense, other tensors jagged, also where all rows have one shape.
    """
    if not isinstance(column, torch.Tensor) or (not column.is_nested and column.dim() == 1):
        return column
    if column.is_nested:
        if column.layout == torch.jagged:
            return column
        return AsyncSimpleStorageManager._pack_field_values(list(column.unbind()))
    rows, length = column.shape[:2]
    return torch.nested.nested_tensor_from_jagged(
        column.flatten(0, 1),
        torch.arange(rows + 1) * length,
        min_seqlen=length,
        max_seqlen=length,
    )


def _merged(answers: Sequence[tuple[Sequence[int], dict[str, Any]]], size: int) -> dict[str, Any]:
    """Columns of several partitions as one, each row at its place."""
    rows: dict[str, list[Any]] = {name: [None] * size for name in answers[0][1]}
    for at, columns in answers:
        for name, column in columns.items():
            tensor = isinstance(column, torch.Tensor)
            for i, value in zip(at, column.unbind() if tensor else column.tolist(), strict=True):
                rows[name][i] = value
    return {name: AsyncSimpleStorageManager._pack_field_values(row) for name, row in rows.items()}
