"""`PackedStorageManager`: the packed backend as a storage manager of TransferQueue.

It serves two kinds of clients. `TQDataPlaneClient` moves its values itself and uses TransferQueue
only to register rows. TransferQueue's own clients put and get through this manager, if the queue
was started by `dataplane_tq.storage.packed_bootstrap`: then the config has the key `RAW`.

TransferQueue reuses the index of a cleared row, so an index does not identify a row. Therefore each
value has a cell, a number that is never reused. A put reports the cells to the controller, and each
meta carries them. A meta is refused if all cells that it has for one of its rows are out of date:
that row was cleared or completely overwritten.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any  # Any: TransferQueue's metas have no static types

import msgspec
import numpy as np
import ray
import torch
from tensordict import NonTensorStack, TensorDict

from dataplane_core import (
    CapacityExceeded,
    DeadlineExceededError,
    InvalidRequestError,
    MissingDataError,
    PartitionNotFoundError,
    UnsupportedError,
)
from dataplane_core.boundary import check_put
from dataplane_core.declaration import PartitionDeclaration
from dataplane_core.errors import listed
from dataplane_tq.directory import protocol as p
from dataplane_tq.directory.wire import Address, Link, Session
from dataplane_tq.packed.access import UnitAccess
from dataplane_tq.packed.encoding import encode, plain_jagged
from dataplane_tq.packed.layout import Indices
from dataplane_tq.packed.unit_client import Transport
from dataplane_tq.packed.unit_wire import UnitAddress
from dataplane_tq.storage.new_keys import forget_new_keys
from dataplane_tq.storage.packed_checkpoint import load, save
from dataplane_tq.upstream import (
    AsyncSimpleStorageManager,
    StorageManager,
    StorageManagerFactory,
    extract_field_schema,
)

BACKEND = "PackedStorage"
"""Name of the backend in TransferQueue's registries, and of its configuration section."""

RAW = "raw"
"""Key of the manager's config; only `dataplane_tq.storage.packed_bootstrap` sets it."""

_PREFIX = "tq:"
"""Beginning of the directory's name for a partition of TransferQueue."""

_REFUSALS = (CapacityExceeded, InvalidRequestError, UnsupportedError)
"""Errors after which a put has stored nothing."""

Cells = dict[str, Indices]
"""Field to an array with the cell of each row."""


logger = logging.getLogger(__name__)


class RawConnection(msgspec.Struct, frozen=True):
    """Data with which TransferQueue's own clients connect to the units and the directory.

    It is part of TransferQueue's configuration. Unpickling it imports this module, which registers
    the manager in a process that only calls ``transfer_queue.init()``.
    """

    directory: Address
    units: dict[str, UnitAddress]
    token: bytes
    transport: Transport
    timeout_s: float
    allow_pickle: bool = False

    def __repr__(self) -> str:
        return f"RawConnection({sorted(self.units)})"  # TransferQueue logs its configuration


class Registration(msgspec.Struct, frozen=True):
    """Value without data in TransferQueue's configuration of a data plane.

    Unpickling it imports this module, as with `RawConnection`.
    """


class RawStore:
    """Access to the rows of TransferQueue's own clients. Its methods block.

    Each partition of TransferQueue is also one of the directory; its first put registers it there.
    A row's sample id is its global index.
    """

    def __init__(self, connection: RawConnection) -> None:
        self.timeout_s = connection.timeout_s
        self._link = Link(connection.directory, timeout_s=connection.timeout_s)
        self._units = UnitAccess(
            connection.units,
            connection.token,
            transport=connection.transport,
            timeout_s=connection.timeout_s,
            allow_pickle=connection.allow_pickle,
        )
        self._allow_pickle = connection.allow_pickle
        self._node = ray.get_runtime_context().get_node_id() if ray.is_initialized() else ""

    def put(
        self, partition_id: str, indexes: Sequence[int], data: TensorDict, meta: Cells
    ) -> Cells:
        """Write fields of rows; return their cells.

        Args:
            partition_id: TransferQueue's partition.
            indexes: global indexes of the rows.
            data: values of the rows.
            meta: cells in the caller's meta; empty for new rows.

        Raises:
            MissingDataError: the meta is stale.
        """
        sample_ids = [str(index) for index in indexes]
        check_put("put", sample_ids, partition_id)
        if meta:
            with self._link.session(f"put(partition={partition_id!r})") as session:
                self._find(session, partition_id, sample_ids, list(meta), meta)
                session.send(p.Unpin())
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
        encoded = encode(data, len(sample_ids), allow_pickle=self._allow_pickle)
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
            answer = session.ask(request, p.PutAnswer)
            self._units.write(answer.blocks, encoded)
            session.ask(p.CommitPut(None), type(None))
        cells: dict[str, list[Indices]] = {field.layout.name: [] for field in encoded}
        for block in answer.blocks:
            rows = np.arange(block.layout.rows, dtype=np.int64)
            cells[block.layout.name].append(_cell(np.int64(block.id), rows))
        return {name: np.concatenate(parts) for name, parts in cells.items()}

    def cells(self, partition_id: str, indexes: Sequence[int], fields: Sequence[str]) -> Cells:
        """Return the current cells of rows.

        Raises:
            MissingDataError, PartitionNotFoundError: a row was cleared, or never had a field.
        """
        sample_ids = [str(index) for index in indexes]
        with self._link.session(f"put(partition={partition_id!r})") as session:
            request = p.Read(_partition(partition_id), sample_ids, list(fields))
            answer = session.ask(request, p.ReadAnswer)
            session.send(p.Unpin())
        return _cells(fields, answer)

    def missing(self, partition_id: str, indexes: Sequence[int]) -> list[int]:
        """Return the rows of ``indexes`` that have no values."""
        sample_ids = [str(index) for index in indexes]
        with self._link.session(f"put(partition={partition_id!r})") as session:
            try:
                session.ask(p.Read(_partition(partition_id), sample_ids, []), p.ReadAnswer)
            except PartitionNotFoundError:
                return list(indexes)
            except MissingDataError as error:
                return [int(sample_id) for sample_id in error.sample_ids]
            session.send(p.Unpin())
        return []

    def get(
        self, partition_id: str, indexes: Sequence[int], fields: list[str], meta: Cells
    ) -> dict[str, Any]:
        """Return the values of rows by field, converted by `_as_transfer_queue`.

        Raises:
            MissingDataError, PartitionNotFoundError: the meta is stale, or a row lacks a field.
        """
        sample_ids = [str(index) for index in indexes]
        with self._link.session(f"get_data(partition={partition_id!r})") as session:
            answer = self._find(session, partition_id, sample_ids, fields, meta)
            values = self._units.read(fields, answer.parts)
            session.send(p.Unpin())
        return {name: _as_transfer_queue(column) for name, column in values.items()}

    def clear(self, partition_id: str, indexes: Sequence[int], meta: Cells) -> None:
        """Free rows, and ignore those that are gone.

        A row never loses a field. So a row that lacks a field of the meta is another sample's, and
        is ignored too.

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
                session.send(p.Unpin())
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
        """Find and pin rows; raise a `MissingDataError` if the meta is stale."""
        answer = session.ask(p.Read(_partition(partition_id), sample_ids, fields), p.ReadAnswer)
        now = _cells(fields, answer)
        same = np.zeros(len(sample_ids), np.bool_)
        for field in fields:
            if field in meta:
                same |= meta[field] == now[field]
        if not same.all():
            stale = [sample_ids[i] for i in np.flatnonzero(~same)]
            raise MissingDataError(
                f"partition {partition_id!r}: the meta is stale: {len(stale)} of "
                f"{len(sample_ids)} rows were overwritten or reused: {listed(stale)}; get the meta "
                "again, after the put"
            )
        return answer

    def save(self, checkpoint: Path) -> None:
        """Write the rows of all partitions; see `packed_checkpoint.save`."""
        save(self._link, self._units, _PREFIX, checkpoint)

    def load(self, checkpoint: Path) -> None:
        """Replace the rows of all partitions; see `packed_checkpoint.load`."""
        load(self._link, self._units, _PREFIX, self._node, checkpoint)

    def close(self) -> None:
        """Close this process's connections."""
        self._link.close()
        self._units.close()


@StorageManagerFactory.register(BACKEND)
class PackedStorageManager(StorageManager):
    """Storage manager for TransferQueue's own clients; `TQDataPlaneClient` does not put through it.

    Args:
        controller_info: TransferQueue's description of the controller's sockets.
        config: for TransferQueue's own clients it has a `RawConnection` at `RAW`.
        zmq_context: the client's context; None creates one.
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
        """Store rows, then report their schema and cells to the controller.

        A refused put removes the keys that ``kv_put`` has registered for it.

        Raises:
            UnsupportedError: (a NotImplementedError) ``data_parser`` is given, or the queue belongs
                to a data plane.
            InvalidRequestError: the rows are of several partitions, or a value cannot be stored.
            DataPlaneError: as `RawStore.put`.
        """
        raw = self._served("write")
        try:
            await self._put(raw, data, metadata, data_parser)
        except _REFUSALS:
            await self._forget_new_keys(raw, metadata)
            raise

    async def _put(
        self,
        raw: RawStore,
        data: TensorDict,
        metadata: Any,
        data_parser: Callable[[Any], Any] | None,
    ) -> None:
        if data_parser is not None:
            raise UnsupportedError(f"{BACKEND} does not run a data_parser; parse before the put")
        if metadata.size == 0 or not data.keys():
            return
        if not data.batch_size:
            raise InvalidRequestError(
                f"put_data: the values have no batch dimension; expected {metadata.size} rows"
            )
        partition_ids = set(metadata.partition_ids)
        if len(partition_ids) != 1:
            raise InvalidRequestError(
                f"put_data: rows of the partitions {listed(sorted(partition_ids))}; put each "
                "partition's rows separately"
            )
        partition_id, indexes = metadata.partition_ids[0], metadata.global_indexes
        schema = await asyncio.to_thread(_field_schema, data)
        known = _known(metadata, range(metadata.size))
        cells = await asyncio.to_thread(raw.put, partition_id, indexes, data, known)
        deadline = time.monotonic() + raw.timeout_s
        while True:
            rows = _by_row(cells)
            located = dict(zip(indexes, rows, strict=True))
            await self.notify_data_update(partition_id, indexes, schema, located)
            # Of two puts to one row, the one reported last may not be the one written last.
            try:
                now = await asyncio.to_thread(raw.cells, partition_id, indexes, list(cells))
            except (MissingDataError, PartitionNotFoundError):
                return  # cleared meanwhile: the same as a clear right after this put
            if all(np.array_equal(now[name], cells[name]) for name in cells):
                break
            if time.monotonic() > deadline:
                raise DeadlineExceededError(
                    f"put(partition={partition_id!r}): other puts kept overwriting the rows for "
                    f"{raw.timeout_s:g} s"
                )
            cells = now
        for row, cell in zip(metadata._custom_backend_meta, rows, strict=True):
            row.update(cell)

    async def _forget_new_keys(self, raw: RawStore, metadata: Any) -> None:
        """Remove the keys of rows that have neither values nor tags; log a failure."""
        try:
            for partition_id, at in _by_partition(metadata).items():
                indexes = [metadata.global_indexes[i] for i in at]
                empty = await asyncio.to_thread(raw.missing, partition_id, indexes)
                if empty:
                    await forget_new_keys(self, partition_id, empty, raw.timeout_s)
        except Exception:  # the caller raises why the put was refused
            logger.warning("the keys of a refused put stay in the controller", exc_info=True)

    async def get_data(self, metadata: Any) -> TensorDict:
        """Return the values of the meta's rows and fields, in the form of SimpleStorage.

        Raises:
            UnsupportedError: the queue belongs to a data plane.
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
        """Free the meta's rows; in a data plane the directory has freed them before.

        Raises:
            DataPlaneError: as `RawStore.clear`.
        """
        if self._raw is None:
            return
        for partition_id, at in _by_partition(metadata).items():
            indexes = [metadata.global_indexes[i] for i in at]
            known = _known(metadata, at)
            await asyncio.to_thread(self._raw.clear, partition_id, indexes, known)

    async def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Write all rows into a folder of TransferQueue's checkpoint.

        Raises:
            UnsupportedError: the queue belongs to a data plane; save its partitions instead.
            DataPlaneError: as `packed_checkpoint.save`.
        """
        await asyncio.to_thread(self._served("save").save, Path(checkpoint_dir))

    async def load_checkpoint(self, checkpoint_dir: str) -> None:
        """Replace all rows by those of a checkpoint.

        Raises:
            UnsupportedError: the queue belongs to a data plane.
            DataPlaneError: as `packed_checkpoint.load`.
        """
        await asyncio.to_thread(self._served("load").load, Path(checkpoint_dir))

    def _served(self, verb: str) -> RawStore:
        if self._raw is None:
            raise UnsupportedError(
                f"this queue belongs to a data plane; use TQDataPlaneClient to {verb}"
            )
        return self._raw

    def close(self) -> None:
        """Close every connection."""
        raw = getattr(self, "_raw", None)  # absent if the handshake failed
        if raw is not None:
            raw.close()
        super().close()


def _partition(partition_id: str) -> str:
    return f"{_PREFIX}{partition_id}"


def _cell(block_ids: Any, rows: Indices) -> Indices:
    """Return a unique number for each value, from its block id and its row in the block."""
    cells: Indices = (block_ids << 32) | rows
    return cells


def _cells(fields: Sequence[str], answer: p.ReadAnswer) -> Cells:
    cells: Cells = {}
    for name, parts in zip(fields, answer.parts, strict=True):
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


def _field_schema(data: TensorDict) -> dict[str, dict[str, Any]]:
    """Return what `extract_field_schema` returns, without cutting jagged tensors into rows.

    TransferQueue's function cuts each nested tensor twice, which costs more than the put's copy.
    """
    if not data.batch_size[0]:
        return {}  # the put refuses it
    jagged = {}
    for name, column in data.items():
        plain = plain_jagged(column) if isinstance(column, torch.Tensor) else None
        if plain is not None:
            jagged[name] = _jagged_schema(*plain)
    others = extract_field_schema(data.exclude(*jagged))
    return {name: jagged.get(name) or others[name] for name, _ in data.items()}


def _jagged_schema(values: torch.Tensor, offsets: torch.Tensor) -> dict[str, Any]:
    item = tuple(values.shape[1:])
    shapes = [(length, *item) for length in offsets.diff().tolist()]
    return {
        "dtype": values.dtype,
        "shape": torch.Size(shapes[0]),
        "is_nested": True,
        "is_non_tensor": False,
        "per_sample_shapes": shapes,
    }


def _known(metadata: Any, at: Sequence[int]) -> Cells:
    """Return the meta's cells of the rows ``at``, for fields that all of them have."""
    rows = [metadata._custom_backend_meta[i] for i in at]
    fields = [name for name in rows[0] if all(name in row for row in rows)] if rows else []
    return {name: np.array([row[name] for row in rows], np.int64) for name in fields}


def _by_partition(metadata: Any) -> dict[str, list[int]]:
    """Return the positions in the meta of each partition's rows."""
    places: dict[str, list[int]] = {}
    for i, partition_id in enumerate(metadata.partition_ids):
        places.setdefault(partition_id, []).append(i)
    return places


def _as_transfer_queue(column: torch.Tensor | NonTensorStack) -> Any:
    """Convert ``column`` to the form of TransferQueue's SimpleStorage.

    A tensor of scalar rows is dense; other tensors are jagged, even if all rows have one shape.
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
    """Merge the columns of several partitions, each row at its position in the meta."""
    rows: dict[str, list[Any]] = {name: [None] * size for name in answers[0][1]}
    for at, columns in answers:
        for name, column in columns.items():
            tensor = isinstance(column, torch.Tensor)
            for i, value in zip(at, column.unbind() if tensor else column.tolist(), strict=True):
                rows[name][i] = value
    return {name: AsyncSimpleStorageManager._pack_field_values(row) for name, row in rows.items()}
