"""Where a client's values go: into packed memory, or through TransferQueue's storage managers.

TransferQueue's controller learns of every row either way; they differ in who moves the bytes, and
in whether the controller has to know before the values can be read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar  # Any: tags, and what a store keeps between encode and write

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from dataplane_core.columns import Column as PaddedColumn
from dataplane_core.columns import check_width, columns_of_fields, fields_of_columns, width_of
from dataplane_core.object_codec import decode_object, encode_object
from dataplane_core.rows import (
    OBJECT,
    Column,
    checked_leaves,
    collate,
    form_of,
    forms_of,
    split_rows,
)
from dataplane_core.schema import PER_SAMPLE_TOO, Form
from dataplane_tq import transfer_queue_rows as rows_in
from dataplane_tq.engine import Engine
from dataplane_tq.packed.access import UnitAccess
from dataplane_tq.packed.encoding import EncodedField, encode, encode_columns
from dataplane_tq.packed.layout import FieldLayout
from dataplane_tq.protocol import PutAnswer, ReadAnswer
from dataplane_tq.seal import seal, unseal


@dataclass(frozen=True)
class Encoded:
    """A put's values in the form that the store writes.

    Attributes:
        kinds: field to kind.
        values: the store's own.
        layouts: of the fields that the directory places.
        forms: field to form, for those that have one.
    """

    kinds: dict[str, str]
    values: Any = None
    layouts: list[FieldLayout] = field(default_factory=list)
    forms: dict[str, Form] = field(default_factory=dict)


class Store(ABC):
    """One process's way to the values.

    Attributes:
        registers: whether `write` registers the rows; else it is done after the commit.
    """

    registers: ClassVar[bool] = True

    @abstractmethod
    def encode(self, fields: TensorDict, count: int) -> Encoded:
        """Take a put's values apart, or refuse them with an `InvalidRequestError`."""

    def encode_columns(
        self,
        columns: Mapping[str, PaddedColumn],
        count: int,
        lengths: Sequence[int] | None,
        ragged: Collection[str],
    ) -> Encoded:
        """The same for columns that `dataplane_core.columns.check_columns` passed."""
        return self.encode(fields_of_columns(columns, count, lengths, ragged), count)

    @abstractmethod
    def write(
        self,
        what: str,
        encoded: Encoded,
        where: PutAnswer,
        sample_ids: list[str],
        partition_id: str,
        tags: Sequence[dict[str, Any]] | None,
        check: Callable[[], None],
    ) -> None:
        """Make the values readable by every process, and register the rows if it `registers`.

        ``check`` raises if the put cannot be committed any more. A store that overwrites values
        where they are calls it right before.
        """

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

    def read_columns(
        self,
        what: str,
        where: ReadAnswer,
        sample_ids: list[str],
        partition_id: str,
        fields: list[str],
        pad_values: Mapping[str, float],
        width: int,
    ) -> dict[str, PaddedColumn]:
        """The same as padded columns, see `DataPlaneClient.get_columns`."""
        answer = self.read(what, where, sample_ids, partition_id, fields)
        columns = columns_of_fields(answer, pad_values=pad_values, width=width, forms=where.forms)
        return {name: columns[name] for name in fields}

    def close(self) -> None:  # noqa: B027  # most stores hold nothing
        """End what this store holds open."""


class TransferQueueStore(Store):
    """Values go through the storage manager of TransferQueue's client.

    Args:
        engine: the process's connection.
        rows_as_bytes: the backend changes tensors, or mixes them up; each row goes as bytes with a
            checksum.
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
                    # TransferQueue's units take no strides.
                    stored[name] = leaf if leaf.is_nested else leaf.contiguous()
                    continue
                rows: Iterable[Any] = leaf.unbind()
            else:
                kinds[name], rows = OBJECT, leaf
            # As bytes they pass TransferQueue untouched; it would change some types.
            values = (encode_object(f"field {name!r}", row) for row in rows)
            if self._rows_as_bytes:
                values = (seal(value) for value in values)
            stored[name] = NonTensorStack(*(NonTensorData(value) for value in values))
        return Encoded(kinds, TensorDict(stored, batch_size=[count]), forms=forms)

    def write(
        self,
        what: str,
        encoded: Encoded,
        where: PutAnswer,
        sample_ids: list[str],
        partition_id: str,
        tags: Sequence[dict[str, Any]] | None,
        check: Callable[[], None],
    ) -> None:
        client = self._engine.client
        rows = self._engine.run(
            what, rows_in.register, client, sample_ids, partition_id, tags, where.leftovers
        )
        if encoded.kinds:
            check()
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
            if self._rows_as_bytes:
                values = [unseal(name, value) for value in values]
            if self._rows_as_bytes or kinds[name] == OBJECT:
                values = [decode_object(value) for value in values]
            columns[name] = Column(kinds[name], values)
        return collate(columns, len(sample_ids))


class PackedStore(Store):
    """Values lie in the storage units' memory, where this process writes and reads them itself.

    Args:
        connection: of the storage backend ``packed``.
        timeout_s: deadline of each exchange with a unit, in seconds.
    """

    registers: ClassVar[bool] = False

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
        forms: dict[str, Form] = dict.fromkeys(ragged, "ragged")
        for name, column in columns.items():
            form = form_of(column)
            if form is not None:
                forms[name] = form
        return _encoded(encode_columns(columns, lengths, ragged), forms)

    def write(
        self,
        what: str,
        encoded: Encoded,
        where: PutAnswer,
        sample_ids: list[str],
        partition_id: str,
        tags: Sequence[dict[str, Any]] | None,
        check: Callable[[], None],
    ) -> None:
        self._units.write(where.blocks, encoded.values or ())

    def read(
        self,
        what: str,
        where: ReadAnswer,
        sample_ids: list[str],
        partition_id: str,
        fields: list[str],
    ) -> TensorDict:
        return TensorDict(self._units.read(fields, where.parts), batch_size=[len(sample_ids)])

    def read_columns(
        self,
        what: str,
        where: ReadAnswer,
        sample_ids: list[str],
        partition_id: str,
        fields: list[str],
        pad_values: Mapping[str, float],
        width: int,
    ) -> dict[str, PaddedColumn]:
        widths = {name: width_of(name, where.forms.get(name), width) for name in fields}
        for name, part in zip(fields, where.parts, strict=True):
            for layout in (block.layout for block in part.blocks if name in PER_SAMPLE_TOO):
                check_width(name, where.forms.get(name), layout.item, width)
        return self._units.read_columns(fields, where.parts, pad_values, widths)

    def close(self) -> None:
        self._units.close()


def _encoded(fields: list[EncodedField], forms: dict[str, Form]) -> Encoded:
    kinds = {item.layout.name: item.layout.kind for item in fields}
    return Encoded(kinds, fields, [item.layout for item in fields], forms)
