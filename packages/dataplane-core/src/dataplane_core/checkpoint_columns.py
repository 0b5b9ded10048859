"""Columns of samples as safetensors and msgpack, nothing pickled.

Tensors keep their dtype and their bits. Python values become what `encode_object` makes of them:
tuples and sets come back as lists, dataclasses as dicts.
Needs the extra ``dataplane-core[checkpoint]``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal  # Any: values of object columns are the caller's own

import msgspec
import numpy as np
import torch

from dataplane_core.object_codec import decode_object, encode_object
from dataplane_core.rows import OBJECT, Column

_NATIVE = frozenset(
    str(dtype)
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
)
"""Dtypes that safetensors has; others are stored as their bytes."""


class StoredColumn(msgspec.Struct, frozen=True):
    """One field of some rows.

    Attributes:
        name: the field.
        kind: name of the dtype, or ``object``.
        form: ``dense`` has ``values`` alone; ``jagged`` rows that differ in their first dimension,
            ``values`` and ``offsets``; ``shaped`` the rows' elements in ``values`` and their
            ``shapes``; ``object`` encoded values, ``values`` and ``offsets``.
        shape: of ``values``, which are bytes if safetensors does not have the dtype.
    """

    name: str
    kind: str
    form: Literal["dense", "jagged", "shaped", "object"]
    shape: list[int]


def pack(name: str, column: Column) -> tuple[StoredColumn, dict[str, torch.Tensor]]:
    """A column as tensors that safetensors can store; the inverse of `unpack`.

    Raises:
        InvalidRequestError: (a ValueError) naming the field and the type that cannot be stored.
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
    tensors["values"] = values if column.kind in _NATIVE else _as_bytes(values)
    return stored, tensors


def unpack(stored: StoredColumn, tensors: dict[str, torch.Tensor]) -> Column:
    """A column from what `pack` made.

    Raises:
        ValueError: the tensors are not those of such a column.
    """
    values = tensors["values"]
    if stored.kind == OBJECT:
        raw = values.numpy().tobytes()
        bounds = itertools.pairwise(tensors["offsets"].tolist())
        return Column(OBJECT, [decode_object(raw[begin:end]) for begin, end in bounds])
    if stored.kind not in _NATIVE:
        values = _from_bytes(values, _dtype(stored.kind.removeprefix("torch.")))
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


def _as_bytes(values: torch.Tensor) -> torch.Tensor:
    flat = values.flatten()
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)


def _from_bytes(raw: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return raw.view(dtype) if raw.numel() else torch.empty(0, dtype=dtype)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"stored tensor has dtype {name!r}, which torch does not have")
    return dtype
