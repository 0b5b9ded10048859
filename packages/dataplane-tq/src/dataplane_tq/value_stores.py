"""Stores of a client's values: packed memory, or TransferQueue's storage managers.

They differ in who moves the bytes, and in whether TransferQueue's controller must have a row before
its values can be read. The storage managers require that. Rows in packed memory are reported after
the commit, unless the mirror is off.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar  # Any: tags, and a store's values between encode and write

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from dataplane_core import UnavailableError
from dataplane_core.boundary import PutRequest, ReadRequest
from dataplane_core.schema import PER_TOKEN_OR_SAMPLE_FIELDS, Form
from dataplane_core.tensors.columns import Column as PaddedColumn
from dataplane_core.tensors.columns import (
    check_width,
    columns_of_fields,
    fields_of_columns,
    width_of,
)
from dataplane_core.tensors.object_codec import decode_object, encode_object
from dataplane_core.tensors.rows import (
    OBJECT,
    Column,
    checked_leaves,
    collate,
    form_of,
    forms_of,
    set_form,
    set_forms,
    split_rows,
)
from dataplane_tq.directory.protocol import PutAnswer, ReadAnswer
from dataplane_tq.mirror import rows as mirror_rows
from dataplane_tq.mirror.engine import Engine
from dataplane_tq.packed.access import UnitAccess
from dataplane_tq.packed.encoding import EncodedField, encode, encode_columns
from dataplane_tq.packed.layout import FieldLayout


@dataclass(frozen=True)
class Encoded:
    """Values of a put in the form that the store writes.

    Attributes:
        kinds: field to kind.
        values: values in a form private to the store.
        layouts: layouts of the fields whose bytes the directory places.
        forms: field to form, for fields that have one.
    """

    kinds: dict[str, str]
    values: Any = None
    layouts: list[FieldLayout] = field(default_factory=list)
    forms: dict[str, Form] = field(default_factory=dict)


class Store(ABC):
    """Store of values, as one process accesses it.

    Attributes:
        reports_rows: whether `write` reports the rows to TransferQueue; if False, the client
            reports them after the commit.
    """

    reports_rows: ClassVar[bool] = True

    @abstractmethod
    def encode(self, fields: TensorDict, count: int) -> Encoded:
        """Encode a put's values; raise an `InvalidRequestError` if one cannot be stored."""

    def encode_columns(
        self,
        columns: Mapping[str, PaddedColumn],
        count: int,
        lengths: Sequence[int] | None,
        ragged: Collection[str],
    ) -> Encoded:
        """Encode columns that `dataplane_core.tensors.columns.check_columns` accepted."""
        return self.encode(fields_of_columns(columns, count, lengths, ragged), count)

    @abstractmethod
    def write(
        self, put: PutRequest, encoded: Encoded, answer: PutAnswer, check: Callable[[], None]
    ) -> None:
        """Make the values readable by every process, and report the rows if `reports_rows`.

        ``check`` raises if the put cannot be committed any more. A store that overwrites values in
        place calls it right before the write.
        """

    @abstractmethod
    def read(self, read: ReadRequest, answer: ReadAnswer) -> TensorDict:
        """Return copies of the values of pinned samples, in the order of the request."""

    def read_columns(
        self,
        read: ReadRequest,
        answer: ReadAnswer,
        pad_values: Mapping[str, float],
        width: int,
    ) -> dict[str, PaddedColumn]:
        """Return the values as padded columns: see `DataPlaneClient.get_columns`."""
        rows = self.read(read, answer)
        columns = columns_of_fields(rows, pad_values=pad_values, width=width)
        return {name: columns[name] for name in read.fields}

    def close(self) -> None:  # noqa: B027  # most stores hold nothing
        """Close the store's connections."""


class TransferQueueStore(Store):
    """Store that uses the storage manager of TransferQueue's client.

    Args:
        engine: this process's client of TransferQueue.
        rows_as_bytes: whether to store each row as bytes with a checksum, because the backend
            changes tensors or returns the wrong ones.
    """

    def __init__(self, engine: Engine, *, rows_as_bytes: bool) -> None:
        self._engine = engine
        self._rows_as_bytes = rows_as_bytes

    def encode(self, fields: TensorDict, count: int) -> Encoded:
        stored: dict[str, Any] = {}
        kinds: dict[str, str] = {}
        forms: dict[str, Form] = {}
        for name, leaf in checked_leaves(fields, count).items():
            form = form_of(leaf)
            if form is not None:
                forms[name] = form
            if isinstance(leaf, torch.Tensor):
                kinds[name] = str(leaf.dtype)
                if not self._rows_as_bytes:
                    # TransferQueue's units store contiguous tensors only.
                    stored[name] = leaf if leaf.is_nested else leaf.contiguous()
                    continue
                rows: Iterable[Any] = leaf.unbind()
            else:
                kinds[name], rows = OBJECT, leaf
            # TransferQueue returns bytes unchanged, but changes values of some other types.
            values = (encode_object(f"field {name!r}", row) for row in rows)
            if self._rows_as_bytes:
                values = (_with_checksum(value) for value in values)
            stored[name] = NonTensorStack(*(NonTensorData(value) for value in values))
        return Encoded(kinds, TensorDict(stored, batch_size=[count]), forms=forms)

    def write(
        self, put: PutRequest, encoded: Encoded, answer: PutAnswer, check: Callable[[], None]
    ) -> None:
        client, what = self._engine.client, put.operation
        ids, partition_id = put.sample_ids, put.partition_id
        rows = self._engine.run(
            what, mirror_rows.register, client, ids, partition_id, put.tags, answer.orphans
        )
        if encoded.kinds:
            check()
            values = encoded.values
            self._engine.run(what, mirror_rows.store, client, values, rows, ids, partition_id, what)

    def read(self, read: ReadRequest, answer: ReadAnswer) -> TensorDict:
        distinct = list(dict.fromkeys(read.sample_ids))
        client, what = self._engine.client, read.operation
        fields = self._engine.run(
            what, mirror_rows.read, client, distinct, read.partition_id, read.fields, what
        )
        places = {sample_id: i for i, sample_id in enumerate(distinct)}
        order = [places[sample_id] for sample_id in read.sample_ids]
        kinds = dict(zip(read.fields, answer.kinds, strict=True))
        columns: dict[str, Column] = {}
        for name, column in split_rows(fields, len(distinct)).items():
            values = [column.rows[i] for i in order]
            if self._rows_as_bytes:
                values = [_without_checksum(name, value) for value in values]
            if self._rows_as_bytes or kinds[name] == OBJECT:
                values = [decode_object(value) for value in values]
            columns[name] = Column(kinds[name], values)
        return set_forms(collate(columns, len(order)), answer.forms)


class PackedStore(Store):
    """Store of the packed backend: this process accesses the storage units itself.

    Args:
        connection: `StorageBackend.connection` of ``packed``.
        timeout_s: deadline of each exchange with a unit, in seconds.
    """

    reports_rows: ClassVar[bool] = False

    def __init__(self, connection: dict[str, Any], timeout_s: float) -> None:
        self._units = UnitAccess(
            connection["units"],
            connection["token"],
            transport=connection["transport"],
            timeout_s=timeout_s,
        )

    def encode(self, fields: TensorDict, count: int) -> Encoded:
        return _encoded(encode(fields, count), forms_of(fields))

    def encode_columns(
        self,
        columns: Mapping[str, PaddedColumn],
        count: int,
        lengths: Sequence[int] | None,
        ragged: Collection[str],
    ) -> Encoded:
        forms: dict[str, Form] = {name: "ragged" for name in ragged if name in columns}
        for name, column in columns.items():
            form = form_of(column)
            if form is not None:
                forms[name] = form
        return _encoded(encode_columns(columns, lengths, ragged), forms)

    def write(
        self, put: PutRequest, encoded: Encoded, answer: PutAnswer, check: Callable[[], None]
    ) -> None:
        self._units.write(answer.blocks, encoded.values or ())

    def read(self, read: ReadRequest, answer: ReadAnswer) -> TensorDict:
        leaves = self._units.read(read.fields, answer.parts)
        return set_forms(TensorDict(leaves, batch_size=[len(read.sample_ids)]), answer.forms)

    def read_columns(
        self,
        read: ReadRequest,
        answer: ReadAnswer,
        pad_values: Mapping[str, float],
        width: int,
    ) -> dict[str, PaddedColumn]:
        fields, forms = read.fields, answer.forms
        widths = {name: width_of(name, forms.get(name), width) for name in fields}
        for name, part in zip(fields, answer.parts, strict=True):
            if name in PER_TOKEN_OR_SAMPLE_FIELDS:
                for block in part.blocks:
                    check_width(name, forms.get(name), block.layout.item, width)
        columns = self._units.read_columns(fields, answer.parts, pad_values, widths)
        return {
            name: set_form(column, forms.get(name)) if isinstance(column, torch.Tensor) else column
            for name, column in columns.items()
        }

    def close(self) -> None:
        self._units.close()


def _encoded(fields: list[EncodedField], forms: dict[str, Form]) -> Encoded:
    kinds = {item.layout.name: item.layout.kind for item in fields}
    return Encoded(kinds, fields, [item.layout for item in fields], forms)


def _with_checksum(data: bytes) -> bytes:
    """Prepend the checksum of ``data``."""
    return zlib.crc32(data).to_bytes(4, "little") + data


def _without_checksum(field: str, data: Any) -> bytes:
    """Check and remove the checksum of `_with_checksum`.

    Raises:
        UnavailableError: the bytes differ from the stored ones.
    """
    if not isinstance(data, bytes) or zlib.crc32(data[4:]).to_bytes(4, "little") != data[:4]:
        raise UnavailableError(
            f"field {field!r}: the storage backend returned bytes that differ from those put"
        )
    return data[4:]
