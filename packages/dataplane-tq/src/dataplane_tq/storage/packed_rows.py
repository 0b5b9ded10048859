"""`RawStore`: rows of TransferQueue's own clients in the packed backend's units.

A row is packed to bytes when it is put, and becomes TransferQueue's tensors again when it is read.

TransferQueue reuses the index of a cleared row, so an index does not identify a row. Therefore each
value has a cell, the number of the block that it was put into, which is never reused. A put returns
the cells of its values, and each meta (TransferQueue's `BatchMeta`) carries them. A meta is refused
if all cells that it has for one of its rows are out of date: that row was cleared or completely
overwritten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any  # Any: TransferQueue's fields have no static types

import msgspec
import numpy as np
import ray
import torch
from tensordict import NonTensorStack, TensorDict

from dataplane_core import MissingDataError, PartitionNotFoundError
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
from dataplane_tq.storage.packed_checkpoint import load, save
from dataplane_tq.upstream import AsyncSimpleStorageManager, extract_field_schema

_PREFIX = "tq:"
"""Beginning of the directory's name for a partition of TransferQueue."""

Cells = dict[str, Indices]
"""Cells of each row as an array, by field."""


class RowsConnection(msgspec.Struct, frozen=True):
    """Data with which a process connects to the units and the directory."""

    directory: Address
    units: dict[str, UnitAddress]
    token: bytes
    transport: Transport
    timeout_s: float
    allow_pickle: bool = False

    def __repr__(self) -> str:
        # TransferQueue logs its configuration: the token must not be in it.
        return f"{type(self).__name__}({sorted(self.units)})"


class PinnedRows(msgspec.Struct, frozen=True):
    """Pinned rows of one partition.

    Attributes:
        indexes: global indexes of the rows.
        clear: frees the rows, and ends their pins.
    """

    indexes: list[int]
    clear: Callable[[], None]


class RawStore:
    """Access to the rows of TransferQueue's own clients. Its methods block.

    Each partition of TransferQueue is also a partition of the directory; its first put registers it
    there. A row's sample id is its global index.
    """

    def __init__(self, connection: RowsConnection) -> None:
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
        self,
        partition_id: str,
        indexes: Sequence[int],
        data: TensorDict,
        meta: Cells,
        report: Callable[[Cells], None],
    ) -> Cells:
        """Write fields of rows; return their cells.

        Args:
            partition_id: TransferQueue's partition.
            indexes: global indexes of the rows.
            data: values of the rows.
            meta: cells in the caller's meta; empty for new rows.
            report: is called with the cells, once the rows are readable. Until it returns, no other
                put of the rows is visible, and no clear of them returns.

        Raises:
            MissingDataError, PartitionNotFoundError: the meta is stale.
        """
        sample_ids = [str(index) for index in indexes]
        check_put("put", sample_ids, partition_id)
        encoded = encode(data, len(sample_ids), allow_pickle=self._allow_pickle)
        name = _partition(partition_id)
        request = p.BeginPut(
            name,
            sample_ids,
            {field.layout.name: field.layout.kind for field in encoded},
            [field.layout for field in encoded],
            self._node,
            None,
            self.timeout_s,
            cells=_packed(meta),
        )
        with self._link.session(f"put(partition={partition_id!r})") as session:
            try:
                answer = session.ask(request, p.PutAnswer)
            except PartitionNotFoundError:
                if meta:
                    raise
                declaration = PartitionDeclaration.checked(name, [], 0, [])
                session.ask(p.Register(declaration), type(None))
                answer = session.ask(request, p.PutAnswer)
            self._units.write(answer.blocks, encoded)
            cells = {field.layout.name: np.empty(field.layout.rows, np.int64) for field in encoded}
            for block in answer.blocks:
                rows = slice(block.first_row, block.first_row + block.layout.rows)
                cells[block.layout.name][rows] = block.cell
            session.ask(p.CommitPut(None, will_report=True), type(None))
            report(cells)
            session.send(p.Unpin())
        return cells

    @contextmanager
    def pinned(self, partition_id: str, indexes: Sequence[int]) -> Iterator[PinnedRows]:
        """Pin the rows that exist: until the block ends, no clear of them by others returns."""
        name, sample_ids = _partition(partition_id), [str(index) for index in indexes]
        with self._link.session(f"clear(partition={partition_id!r})") as session:
            try:
                session.ask(p.Read(name, sample_ids, []), p.ReadAnswer)
            except PartitionNotFoundError:
                sample_ids = []
            except MissingDataError as error:
                gone = set(error.sample_ids)
                sample_ids = [each for each in sample_ids if each not in gone]
                session.ask(p.Read(name, sample_ids, []), p.ReadAnswer)

            def clear() -> None:
                session.ask(p.Clear(name, sample_ids, True, self.timeout_s), p.ClearAnswer)
                session.ask(p.Dropped(), type(None))

            yield PinnedRows([int(sample_id) for sample_id in sample_ids], clear)
            session.send(p.Unpin())

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
        """Return the values of rows by field, converted by `as_transfer_queue`.

        Raises:
            MissingDataError, PartitionNotFoundError: the meta is stale, or a row lacks a field.
        """
        sample_ids = [str(index) for index in indexes]
        with self._link.session(f"get_data(partition={partition_id!r})") as session:
            answer = self._find(session, partition_id, sample_ids, fields, meta)
            values = self._units.read(fields, answer.parts)
            session.send(p.Unpin())
        return {name: as_transfer_queue(column) for name, column in values.items()}

    def clear(self, partition_id: str, indexes: Sequence[int], meta: Cells) -> None:
        """Free rows, and ignore those that are gone.

        Raises:
            MissingDataError: the meta is stale; no row was freed.
        """
        sample_ids = [str(index) for index in indexes]
        request = p.Clear(
            _partition(partition_id), sample_ids, True, self.timeout_s, cells=_packed(meta)
        )
        with self._link.session(f"clear(partition={partition_id!r})") as session:
            session.ask(request, p.ClearAnswer)
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
        current = _cells(fields, answer)
        same = np.zeros(len(sample_ids), np.bool_)
        for field in fields:
            if field in meta:
                same |= meta[field] == current[field]
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


def _partition(partition_id: str) -> str:
    return f"{_PREFIX}{partition_id}"


def _packed(cells: Cells) -> dict[str, bytes]:
    return {name: column.tobytes() for name, column in cells.items()}


def _cells(fields: Sequence[str], answer: p.ReadAnswer) -> Cells:
    return {
        name: np.array([block.cell for block in parts.blocks], np.int64)[parts.locate()[0]]
        for name, parts in zip(fields, answer.parts, strict=True)
    }


def field_schema(data: TensorDict) -> dict[str, dict[str, Any]]:
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


def as_transfer_queue(column: torch.Tensor | NonTensorStack) -> Any:
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


def merge_columns(
    answers: Sequence[tuple[Sequence[int], dict[str, Any]]], size: int
) -> dict[str, Any]:
    """Merge the columns of several partitions, each row at its position in the meta."""
    rows: dict[str, list[Any]] = {name: [None] * size for name in answers[0][1]}
    for at, columns in answers:
        for name, column in columns.items():
            tensor = isinstance(column, torch.Tensor)
            for i, value in zip(at, column.unbind() if tensor else column.tolist(), strict=True):
                rows[name][i] = value
    return {name: AsyncSimpleStorageManager._pack_field_values(row) for name, row in rows.items()}
