"""Rows in and out of TensorDicts: what every adapter needs to keep the contract on answers.

Public to authors of adapters.

A store holds values per (sample, field). `split_rows` takes a put's TensorDict apart,
`collate_rows` puts an answer together: rows of one shape as a dense tensor, rows of different
lengths as a jagged one, Python values as a NonTensorStack.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any  # Any: a row of a non-tensor field is the caller's own Python value

import numpy as np
import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    is_tensor_collection,
)

from dataplane_core.arguments import checked_name, refused
from dataplane_core.errors import InvalidRequestError, InvalidTypeError
from dataplane_core.schema import Form

OBJECT = "object"
"""Kind of a field whose rows are Python values; a tensor field's kind is its dtype's name."""


@dataclass(frozen=True)
class Column:
    """One field of a batch, row by row.

    Attributes:
        kind: name of the tensors' dtype, as ``torch.int64``, or `OBJECT`.
        rows: one tensor or Python value per row. Tensors may share memory with what they came from.
        form: how a nested tensor's rows relate, see `form_of`; None for dense tensors and objects.
    """

    kind: str
    rows: list[Any]
    form: Form | None = None


def form_of(leaf: object) -> Form | None:
    """``ragged`` for a jagged tensor, ``shaped`` for a strided nested one, else None."""
    if not isinstance(leaf, torch.Tensor) or not leaf.is_nested:
        return None
    return "ragged" if leaf.layout == torch.jagged else "shaped"


def forms_of(fields: TensorDictBase) -> dict[str, Form]:
    """`form_of` each leaf that has one."""
    forms = ((name, form_of(_leaf(fields, name))) for name in fields.keys())  # noqa: SIM118
    return {name: form for name, form in forms if form is not None}


def split_rows(fields: TensorDictBase, count: int) -> dict[str, Column]:
    """Take ``fields`` apart into rows.

    Args:
        fields: batch of ``count`` rows; leaves are dense or nested tensors with ``count`` rows,
            NonTensorStack or NonTensorData (an array or list is taken row by row, any other value
            belongs to every row).
        count: expected number of rows.

    Raises:
        InvalidRequestError: (a ValueError) as `checked_leaves`.
    """
    return {
        name: (
            Column(str(leaf.dtype), list(leaf.unbind()), form_of(leaf))
            if isinstance(leaf, torch.Tensor)
            else Column(OBJECT, leaf)
        )
        for name, leaf in checked_leaves(fields, count).items()
    }


def checked_leaves(fields: object, count: int) -> dict[str, torch.Tensor | list[Any]]:
    """The fields of a put, each with ``count`` rows, whatever client they go through.

    Args:
        fields: as `split_rows` takes them; without a batch size the rows of its leaves count.
        count: expected number of rows.

    Returns:
        Field to a tensor as `storable_tensor` has it, or to a list of Python values, one per row.

    Raises:
        InvalidRequestError: (a ValueError) if ``fields`` is no TensorDict, a leaf has another
            number of rows, is a tensor that cannot be stored or is itself a TensorDict of tensors.
    """
    if not isinstance(fields, TensorDictBase) or isinstance(fields, NonTensorStack | NonTensorData):
        raise refused(
            "put_samples", "fields", fields, "a TensorDict; put_columns takes a dict of columns"
        )
    if fields.batch_dims and fields.batch_size[0] != count:
        raise InvalidRequestError(
            f"fields: batch size {tuple(fields.batch_size)}; expected {count} rows, one per id"
        )
    leaves: dict[str, torch.Tensor | list[Any]] = {}
    for key in fields.keys():  # noqa: SIM118  # iterating a TensorDict walks rows
        name = checked_name("put_samples", "a field's name", key)
        found = _leaf(fields, name)
        if isinstance(found, torch.Tensor):
            leaves[name] = storable_tensor(f"field {name!r}", found)
            rows = int(found.size(0)) if found.dim() else 0  # len() fails on some nested tensors
        else:
            leaves[name] = values = _object_rows(name, found, count)
            rows = len(values)
        if rows != count:
            raise InvalidRequestError(f"field {name!r}: {rows} rows; expected {count}")
    return leaves


def _leaf(fields: TensorDictBase, name: str) -> Any:
    if isinstance(fields, LazyStackedTensorDict):
        return fields.get(name)
    # get() would already unwrap non-tensor leaves and lose whether they were per row.
    return fields._get_str(name, None)


def storable_tensor(what: str, tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` as it is stored: in main memory, without gradient, conjugated bits resolved.

    Args:
        what: names it in the error.
        tensor: dense or nested.

    Raises:
        InvalidTypeError: (a ValueError and a TypeError) it is sparse, quantized or without data.
    """
    # Without this each attribute of a jagged tensor costs 40 us.
    with torch._C.DisableTorchFunctionSubclass():
        layout, device, nested = tensor.layout, tensor.device.type, tensor.is_nested
        quantized, tracked = tensor.is_quantized, tensor.requires_grad
    if layout not in (torch.strided, torch.jagged) or quantized or device == "meta":
        kind = "quantized" if quantized else f"{layout} on device {device}"
        raise InvalidTypeError(
            f"{what} is a tensor that is {kind}; expected a dense or nested tensor with data"
        )
    plain = tensor.detach() if tracked else tensor
    if device != "cpu":
        plain = plain.cpu()
    if not nested and (plain.is_conj() or plain.is_neg()):
        plain = plain.resolve_conj().resolve_neg()
    return plain


def _object_rows(name: str, leaf: Any, count: int) -> list[Any]:
    if isinstance(leaf, NonTensorStack):
        rows: list[Any] = leaf.tolist()
        return rows
    if isinstance(leaf, NonTensorData):
        data = leaf.data
        if isinstance(data, list | tuple) or (isinstance(data, np.ndarray) and data.ndim):
            return list(data)
        return [data] * count
    if is_tensor_collection(leaf):
        raise InvalidRequestError(
            f"field {name!r}: nested TensorDicts are not supported; put its leaves as own fields"
        )
    return list(leaf)


def collate_rows(kind: str, rows: Sequence[Any]) -> torch.Tensor | NonTensorStack:
    """Put the rows of one field together; the inverse of `split_rows`.

    Returns:
        For tensors of one shape ``(n, *shape)``, dense. For tensors that differ in their first
        dimension only, a jagged tensor with offsets. For tensors that differ elsewhere, a nested
        tensor of strided layout. For Python values a NonTensorStack.

    Raises:
        InvalidRequestError: (a ValueError) if tensors differ in their number of dimensions.
    """
    if kind == OBJECT:
        return NonTensorStack(*(NonTensorData(value) for value in rows))
    first = rows[0].shape
    if all(row.shape == first for row in rows):
        return torch.stack(list(rows))
    return jagged_from_rows(rows, like=rows[0]) if are_ragged(rows) else shaped_from_rows(rows)


def are_ragged(rows: Sequence[torch.Tensor]) -> bool:
    """Whether ``rows``, at least one, differ in their first dimension at most."""
    first = rows[0]
    return first.dim() > 0 and all(
        row.dim() == first.dim() and row.shape[1:] == first.shape[1:] for row in rows
    )


def jagged_from_rows(rows: Sequence[torch.Tensor], *, like: torch.Tensor) -> torch.Tensor:
    """A jagged tensor of ``rows``.

    Args:
        rows: tensors of shape (length, *features) that differ in their length only.
        like: gives dtype, device and ``features`` where there are no rows, as (any, *features).
    """
    lengths = torch.tensor([row.shape[0] for row in rows], dtype=torch.int64)
    offsets = torch.zeros(len(rows) + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=offsets[1:])
    values = torch.cat(list(rows)) if rows else like.new_empty((0, *like.shape[1:]))
    return torch.nested.nested_tensor_from_jagged(
        values,
        offsets.to(values.device),
        min_seqlen=int(lengths.min()) if rows else 0,
        max_seqlen=int(lengths.max()) if rows else 0,
    )


def leaves_of_rows(
    column: Column,
) -> list[tuple[list[int], torch.Tensor | NonTensorStack]]:
    """Leaves, and the places of their rows, that put ``column`` again in its form.

    One, unless rows of a field without a form differ in their shape: put together they would give
    it one.
    """
    everywhere = list(range(len(column.rows)))
    if column.form == "ragged" and are_ragged(column.rows):
        return [(everywhere, jagged_from_rows(column.rows, like=column.rows[0]))]
    if column.form == "shaped":
        return [(everywhere, shaped_from_rows(column.rows))]
    if column.kind == OBJECT:
        return [(everywhere, collate_rows(OBJECT, column.rows))]
    alike: dict[torch.Size, list[int]] = {}
    for place, row in enumerate(column.rows):
        alike.setdefault(row.shape, []).append(place)
    return [
        (places, torch.stack([column.rows[place] for place in places])) for places in alike.values()
    ]


def shaped_from_rows(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """A nested tensor of strided layout, whose rows keep the shapes that they have.

    Raises:
        InvalidRequestError: (a ValueError) if they differ in their number of dimensions.
    """
    dims = sorted({row.dim() for row in rows})
    if len(dims) > 1:
        raise InvalidRequestError(
            f"rows of one field have {dims} dimensions, which no tensor holds together; read or "
            "put them separately"
        )
    return torch.nested.nested_tensor(list(rows), layout=torch.strided)


def collate(columns: Mapping[str, Column], count: int) -> TensorDict:
    """A TensorDict of batch size ``(count,)`` from columns; empty if there are no rows."""
    if count == 0:
        return TensorDict({}, batch_size=[0])
    return TensorDict(
        {name: collate_rows(column.kind, column.rows) for name, column in columns.items()},
        batch_size=[count],
    )
