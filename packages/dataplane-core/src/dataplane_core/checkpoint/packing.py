"""Columns of samples as safetensors and msgpack, without pickle.

Tensors keep their dtype and bits. Python values are stored as `encode_object` encodes them: tuples
and sets become lists, dataclasses dicts. Needs the extra ``dataplane-core[checkpoint]``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
import torch

from dataplane_core.tensors.columns import bytes_of
from dataplane_core.tensors.object_codec import decode_object, encode_object
from dataplane_core.tensors.rows import OBJECT, Column, dtype_named

_NATIVE = frozenset(
    str(dtype)
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
)
"""Dtypes that safetensors supports; other dtypes are stored as bytes."""


class StoredColumn(msgspec.Struct, frozen=True):
    """The stored form of one column.

    Attributes:
        name: name of the field.
        kind: name of the dtype, or ``object``.
        form: the tensors that store it. ``dense``: ``values`` alone. ``jagged``, for rows that
            differ in their first dimension: ``values`` and ``offsets``. ``shaped``: the elements of
            all rows in ``values``, and their ``shapes``. ``object``: encoded values in ``values``,
            and ``offsets``.
        shape: shape of ``values``, before dtypes that safetensors lacks are converted to bytes.
    """

    name: str
    kind: str
    form: Literal["dense", "jagged", "shaped", "object"]
    shape: list[int]


def pack(name: str, column: Column) -> tuple[StoredColumn, dict[str, torch.Tensor]]:
    """Return a column as tensors that safetensors can store; the inverse of `unpack`.

    Raises:
        InvalidRequestError: (a ValueError) a value cannot be stored; the error names field and
            type.
    """
    rows = column.rows
    if column.kind == OBJECT:
        encoded = [encode_object(f"field {name!r}", value) for value in rows]
        values = torch.from_numpy(np.frombuffer(b"".join(encoded), np.uint8).copy())
        tensors = {"values": values, "offsets": _offsets([len(item) for item in encoded])}
        return StoredColumn(name, OBJECT, "object", list(values.shape)), tensors
    first = rows[0].shape
    form: Literal["dense", "jagged", "shaped"]
    if all(row.shape == first for row in rows):
        form, tensors = "dense", {"values": torch.stack(rows)}
    elif all(row.dim() == len(first) and row.shape[1:] == first[1:] for row in rows):
        form = "jagged"
        tensors = {"values": torch.cat(rows), "offsets": _offsets([len(row) for row in rows])}
    else:
        form = "shaped"
        shapes = torch.tensor([list(row.shape) for row in rows], dtype=torch.int64)
        tensors = {"values": torch.cat([row.reshape(-1) for row in rows]), "shapes": shapes}
    values = tensors["values"].cpu().contiguous()
    stored = StoredColumn(name, column.kind, form, list(values.shape))
    tensors["values"] = values if column.kind in _NATIVE else torch.from_numpy(bytes_of(values))
    return stored, tensors


def unpack(stored: StoredColumn, tensors: dict[str, torch.Tensor]) -> Column:
    """Return the column that `pack` stored.

    Raises:
        ValueError: the tensors do not match ``stored``.
    """
    values = tensors["values"]
    if stored.kind == OBJECT:
        raw = values.numpy().tobytes()
        bounds = itertools.pairwise(tensors["offsets"].tolist())
        return Column(OBJECT, [decode_object(raw[begin:end]) for begin, end in bounds])
    if stored.kind not in _NATIVE:
        dtype = dtype_named(stored.kind.removeprefix("torch."))
        values = values.view(dtype) if values.numel() else torch.empty(0, dtype=dtype)
    values = values.reshape(stored.shape)
    if str(values.dtype) != stored.kind:
        raise ValueError(f"field {stored.name!r} holds {values.dtype}; expected {stored.kind}")
    if stored.form == "dense":
        return Column(stored.kind, list(values.unbind()))
    if stored.form == "jagged":
        bounds = itertools.pairwise(tensors["offsets"].tolist())
        return Column(stored.kind, [values[begin:end] for begin, end in bounds])
    shapes = tensors["shapes"].tolist()
    parts = torch.split(values, [int(np.prod(shape)) for shape in shapes])
    return Column(
        stored.kind, [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
    )


def _offsets(lengths: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int64)
