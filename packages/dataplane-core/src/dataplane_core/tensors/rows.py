"""Conversions between TensorDicts and rows, as the contract prescribes.

A store holds values per (sample, field). `split_rows` splits the TensorDict of a put into rows, and
`collate_rows` joins the rows of a read. Rows of one shape become a dense tensor, rows of different
lengths a jagged one, Python values a NonTensorStack. Public to authors of adapters.
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

from dataplane_core.arguments import argument_type_error, checked_name
from dataplane_core.errors import InvalidRequestError, InvalidTypeError
from dataplane_core.schema import TOKEN_ALIGNED_FIELDS, Form

OBJECT = "object"
"""Kind of a field whose rows are Python values; a tensor field's kind is its dtype's name."""


@dataclass(frozen=True)
class Column:
    """One field of a batch, row by row.

    Attributes:
        kind: name of the tensors' dtype, as ``torch.int64``, or `OBJECT`.
        rows: one tensor or Python value per row. Tensors may be views of the batch.
        form: form of a nested tensor's rows, see `form_of`; None for dense tensors and objects.
    """

    kind: str
    rows: list[Any]
    form: Form | None = None


_FORM = "_dataplane_form"
# Attribute of a tensor that was read: the form of its field, which a dense layout does not show.
# It survives selecting fields and plain pickling; indexing and computations drop it.


def form_of(leaf: object) -> Form | None:
    """Return the form that `set_form` set on a tensor, or else the form of its layout.

    A jagged tensor is ``ragged``, a strided nested one ``shaped``; any other has None.
    """
    if not isinstance(leaf, torch.Tensor):
        return None
    if is_form_known(leaf):
        form: Form | None = getattr(leaf, _FORM)
        return form
    if not leaf.is_nested:
        return None
    return "ragged" if leaf.layout == torch.jagged else "shaped"


def is_form_known(leaf: torch.Tensor) -> bool:
    """Return whether `set_form` set the form of ``leaf``.

    If so, the form None means that the field was put dense. Its rows may still differ in shape
    between puts.
    """
    return hasattr(leaf, _FORM)


def set_form(leaf: torch.Tensor, form: Form | None) -> torch.Tensor:
    """Set the form of a field on a tensor that was read; `form_of` then returns it.

    Returns:
        ``leaf``; or, if it is jagged and its field ``shaped``, a strided nested tensor of its rows.
        Images that differ only in their first dimension would otherwise count as values per token.
    """
    if form == "shaped" and leaf.is_nested and leaf.layout == torch.jagged:
        leaf = shaped_from_rows(leaf.unbind())
    setattr(leaf, _FORM, form)
    return leaf


def set_forms(fields: TensorDict, forms: Mapping[str, Form]) -> TensorDict:
    """Apply `set_form` to each tensor of a read's result, in place.

    Args:
        fields: result of a read.
        forms: field to form, as the store recorded it at the first put that had one.
    """
    for name in list(fields.keys()):
        leaf = _leaf(fields, name)
        if isinstance(leaf, torch.Tensor):
            formed = set_form(leaf, forms.get(name))
            if formed is not leaf:
                fields.set(name, formed)
    return fields


def set_forms_by_lengths(fields: TensorDictBase, lengths: Sequence[int] | None) -> None:
    """Set the forms of jagged tensors whose store records no forms, in place.

    TransferQueue returns dense fields of two or more dims as jagged, so an image's size (height,
    width) looks like two tokens. Therefore a field that is not in `TOKEN_ALIGNED_FIELDS` counts as
    per token only if its rows have the lengths of the samples.

    Args:
        fields: result of a read.
        lengths: tokens of each row. If None or empty, no forms are set: all jagged fields count as
            per token.
    """
    if lengths is None or len(lengths) == 0:  # an array has no truth value
        return
    for name in fields.keys():  # noqa: SIM118
        leaf = _leaf(fields, name)
        if (
            isinstance(leaf, torch.Tensor)
            and name not in TOKEN_ALIGNED_FIELDS
            and not is_form_known(leaf)
            and form_of(leaf) == "ragged"
            and [row.shape[0] for row in leaf.unbind()] != list(lengths)
        ):
            set_form(leaf, None)


def forms_of(fields: TensorDictBase) -> dict[str, Form]:
    """Return the form of each field that has one; see `form_of`."""
    forms = ((name, form_of(_leaf(fields, name))) for name in fields.keys())  # noqa: SIM118
    return {name: form for name, form in forms if form is not None}


def recorded_forms(fields: TensorDict) -> dict[str, Form] | None:
    """Return the forms that `set_forms` set on a result; None if its store records no forms."""
    leaves = [_leaf(fields, name) for name in fields.keys()]  # noqa: SIM118
    if not all(is_form_known(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)):
        return None
    return forms_of(fields)


def split_rows(fields: TensorDictBase, count: int) -> dict[str, Column]:
    """Split ``fields`` into rows.

    Args:
        fields: batch of ``count`` rows. Leaves are dense or nested tensors with ``count`` rows,
            NonTensorStack or NonTensorData. An array or list in NonTensorData has one value per
            row; any other value applies to every row.
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
    """Return the fields of a put, checked to have ``count`` rows and storable values.

    Args:
        fields: as for `split_rows`; without a batch size, only its leaves are checked.
        count: expected number of rows.

    Returns:
        Field to a tensor from `storable_tensor`, or to a list of Python values, one per row.

    Raises:
        InvalidRequestError: (a ValueError) ``fields`` is not a TensorDict, or a leaf has another
            number of rows, cannot be stored, or is a TensorDict of tensors.
    """
    if not isinstance(fields, TensorDictBase) or isinstance(fields, NonTensorStack | NonTensorData):
        raise argument_type_error(
            "put_samples", "fields", fields, "a TensorDict; put_columns takes a dict of columns"
        )
    if fields.batch_dims and fields.batch_size[0] != count:
        raise InvalidRequestError(
            f"fields: batch size {tuple(fields.batch_size)}; expected {count} rows, one per id"
        )
    leaves: dict[str, torch.Tensor | list[Any]] = {}
    for key in fields.keys():  # noqa: SIM118  # iterating a TensorDict yields rows
        name = checked_name("put_samples", "a field's name", key)
        leaf = _leaf(fields, name)
        if isinstance(leaf, torch.Tensor):
            leaves[name] = storable_tensor(f"field {name!r}", leaf)
            rows = int(leaf.size(0)) if leaf.dim() else 0  # len() fails on some nested tensors
        else:
            leaves[name] = values = _object_rows(name, leaf, count)
            rows = len(values)
        if rows != count:
            raise InvalidRequestError(f"field {name!r}: {rows} rows; expected {count}")
    return leaves


def _leaf(fields: TensorDictBase, name: str) -> Any:
    if isinstance(fields, LazyStackedTensorDict):
        return fields.get(name)
    # get() would unwrap non-tensor leaves, which loses whether they were per row.
    return fields._get_str(name, None)


def storable_tensor(what: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` as stores need it: on the CPU, detached, conj and neg bits resolved.

    Args:
        what: name of the tensor, for the error.
        tensor: dense or nested.

    Raises:
        InvalidTypeError: (a ValueError and a TypeError) it is sparse, quantized or without data.
    """
    # Without this block, reading each attribute of a jagged tensor takes 40 us.
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
            f"field {name!r}: nested TensorDicts are not supported; put its leaves as fields"
        )
    return list(leaf)


def dtype_named(name: str) -> torch.dtype:
    """Return the dtype with this name, such as ``int64``; raise ValueError if torch has none."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"stored tensor has dtype {name!r}, which torch does not have")
    return dtype


def collate_rows(kind: str, rows: Sequence[Any]) -> torch.Tensor | NonTensorStack:
    """Join the rows of one field; the inverse of `split_rows`.

    Returns:
        For tensors of one shape a dense tensor ``(n, *shape)``. For tensors that differ in their
        first dimension only, a jagged tensor with offsets. For other tensors, a nested tensor of
        strided layout. For Python values a NonTensorStack.

    Raises:
        InvalidRequestError: (a ValueError) tensors differ in their number of dimensions.
    """
    if kind == OBJECT:
        return NonTensorStack(*(NonTensorData(value) for value in rows))
    first = rows[0].shape
    if all(row.shape == first for row in rows):
        return torch.stack(list(rows))
    return jagged_from_rows(rows, like=rows[0]) if are_ragged(rows) else shaped_from_rows(rows)


def are_ragged(rows: Sequence[torch.Tensor]) -> bool:
    """Return whether ``rows`` (at least one) have equal shapes except in their first dimension."""
    first = rows[0]
    return first.dim() > 0 and all(
        row.dim() == first.dim() and row.shape[1:] == first.shape[1:] for row in rows
    )


def jagged_from_rows(rows: Sequence[torch.Tensor], *, like: torch.Tensor) -> torch.Tensor:
    """Return a jagged tensor of ``rows``.

    Args:
        rows: tensors of shape (length, *features) that differ in their length only.
        like: tensor (any, *features) that gives dtype, device and features if there are no rows.
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
    """Return leaves with their row indices; a put of each leaf restores ``column`` and its form.

    There is one leaf, unless the field has no form and its rows differ in shape. Then a put of all
    rows together would give the field a form.
    """
    all_rows = list(range(len(column.rows)))
    if column.form == "ragged" and are_ragged(column.rows):
        return [(all_rows, jagged_from_rows(column.rows, like=column.rows[0]))]
    if column.form == "shaped":
        return [(all_rows, shaped_from_rows(column.rows))]
    if column.kind == OBJECT:
        return [(all_rows, collate_rows(OBJECT, column.rows))]
    by_shape: dict[torch.Size, list[int]] = {}
    for index, row in enumerate(column.rows):
        by_shape.setdefault(row.shape, []).append(index)
    return [
        (indices, torch.stack([column.rows[index] for index in indices]))
        for indices in by_shape.values()
    ]


def shaped_from_rows(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a nested tensor of strided layout, whose rows keep their shapes.

    Raises:
        InvalidRequestError: (a ValueError) the rows differ in their number of dimensions.
    """
    dims = sorted({row.dim() for row in rows})
    if len(dims) > 1:
        raise InvalidRequestError(
            f"rows of one field have {dims} dimensions, which one tensor cannot hold; read or "
            "put them separately"
        )
    return torch.nested.nested_tensor(list(rows), layout=torch.strided)


def collate(columns: Mapping[str, Column], count: int) -> TensorDict:
    """Return a TensorDict of batch size ``(count,)`` from columns; empty if there are no rows."""
    if count == 0:
        return TensorDict({}, batch_size=[0])
    return TensorDict(
        {name: collate_rows(column.kind, column.rows) for name, column in columns.items()},
        batch_size=[count],
    )
