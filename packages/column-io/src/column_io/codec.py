"""Conversions between padded columns and the jagged form in which they are stored.

In jagged form a row takes memory for its tokens only. Names decide which columns are per token
(`TOKEN_ALIGNED_FIELDS`); in a read, columns that were put jagged are too. The shape (rows, width)
does not distinguish a mask over tokens from an image feature.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any  # Any: leaves are tensors or the caller's own Python values

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from column_io.batched_data_dict import BatchedDataDict
from column_io.column_rows import common_row_count
from dataplane_core import InvalidRequestError, InvalidTypeError, Layout
from dataplane_core.arguments import checked_ints
from dataplane_core.schema import PER_TOKEN_OR_SAMPLE_FIELDS, TOKEN_ALIGNED_FIELDS
from dataplane_core.tensors.columns import (
    Column,
    check_padding,
    columns_of_fields,
    fields_of_columns,
    jagged_from_padded,
    object_column,
)
from dataplane_core.tensors.rows import forms_of, jagged_from_rows


def to_nested_by_length(
    padded: torch.Tensor, lengths: torch.Tensor | Sequence[int]
) -> torch.Tensor:
    """Cut row i of ``padded`` to its first ``lengths[i]`` values.

    Args:
        padded: (n, width, ...), any dtype.
        lengths: n lengths between 0 and ``width``.

    Returns:
        A jagged tensor of n rows with the dtype and bits of ``padded``.

    Raises:
        InvalidRequestError: (a ValueError) ``padded`` has no width, or a length or the number of
            lengths does not fit.
    """
    row_lengths = checked_ints("to_nested_by_length", "lengths", lengths)
    if padded.is_nested or padded.dim() < 2:
        shape = "nested tensor" if padded.is_nested else f"tensor of shape {tuple(padded.shape)}"
        raise InvalidRequestError(f"to_nested_by_length: {shape}; expected (rows, width, ...)")
    if len(row_lengths) != padded.shape[0]:
        raise InvalidRequestError(
            f"to_nested_by_length: {len(row_lengths)} lengths for {padded.shape[0]} rows; expected "
            "one per row"
        )
    longest = max(row_lengths, default=0)
    if longest > padded.shape[1]:
        raise InvalidRequestError(
            f"to_nested_by_length: row {row_lengths.index(longest)} has a length of {longest}; "
            f"expected 0 to the width {padded.shape[1]}"
        )
    return jagged_from_padded(padded, row_lengths)


def pack_per_token_field(
    values: torch.Tensor, lengths: torch.Tensor | Sequence[int]
) -> torch.Tensor:
    """Return ``values`` cut by `to_nested_by_length`, or unchanged if they cannot be cut.

    A tensor cannot be cut if it is nested or one-dimensional, has another number of rows, or is
    narrower than the longest row.

    Raises:
        InvalidRequestError: (a ValueError) a length is not an int of at least 0.
    """
    row_lengths = checked_ints("pack_per_token_field", "lengths", lengths)
    return to_nested_by_length(values, row_lengths) if _can_be_cut(values, row_lengths) else values


def _can_be_cut(values: torch.Tensor, row_lengths: Sequence[int]) -> bool:
    if values.is_nested or values.dim() < 2 or values.shape[0] != len(row_lengths):
        return False
    return int(values.shape[1]) >= max(row_lengths, default=0)


def pack_jagged_fields(
    fields: Mapping[str, torch.Tensor | np.ndarray],
    lengths: torch.Tensor | Sequence[int] | None = None,
    *,
    token_aligned_fields: Collection[str] = TOKEN_ALIGNED_FIELDS,
) -> TensorDict:
    """Return the TensorDict for a put, with jagged token columns.

    Args:
        fields: column name to a tensor or an object array, all with the same number of rows.
        lengths: tokens per row; None leaves every column dense.
        token_aligned_fields: the columns to cut to ``lengths``, even if they are wider than the
            longest row (padded for sequence parallelism). Columns that cannot be cut stay dense,
            see `pack_per_token_field`.

    Returns:
        A TensorDict whose batch size is the number of rows.

    Raises:
        InvalidTypeError: (a TypeError) a column is neither a tensor nor an object array.
        InvalidRequestError: (a ValueError) the columns differ in their number of rows, or a length
            is not an int of at least 0.
    """
    operation = "pack_jagged_fields"
    count = count_columns(operation, fields)
    row_lengths = None if lengths is None else checked_ints(operation, "lengths", lengths)
    ragged = ragged_columns(fields, row_lengths, token_aligned_fields)
    return fields_of_columns(fields, count, row_lengths, ragged)


def count_columns(operation: str, fields: Mapping[str, Column]) -> int:
    """Return the number of rows that all columns have."""
    for name, column in fields.items():
        if not is_storable(column):
            kind = getattr(column, "dtype", None) or type(column).__name__
            raise InvalidTypeError(
                f"{operation}: column {name!r} is {kind}; expected a torch.Tensor or a numpy "
                "array of dtype object"
            )
    return common_row_count(operation, fields)


def ragged_columns(
    fields: Mapping[str, Column],
    lengths: Sequence[int] | None,
    token_aligned_fields: Collection[str] = TOKEN_ALIGNED_FIELDS,
) -> list[str]:
    """Return the names of the token columns that can be cut to ``lengths``."""
    if lengths is None:
        return []
    return [
        name
        for name, column in fields.items()
        if name in token_aligned_fields
        and isinstance(column, torch.Tensor)
        and _can_be_cut(column, lengths)
    ]


def check_token_axis(
    operation: str, fields: Mapping[str, Column], lengths: Sequence[int] | None
) -> None:
    """Refuse token-aligned columns without a token axis.

    Columns of `PER_TOKEN_OR_SAMPLE_FIELDS` may have one value per sample instead, with shape (n,).
    For them the shape (n, 1) is ambiguous without lengths, and a reader would pad it with zeros.
    """
    width = 0 if lengths is None else max(lengths, default=0)
    for name in TOKEN_ALIGNED_FIELDS.intersection(fields):
        column, may_be_per_sample = fields[name], name in PER_TOKEN_OR_SAMPLE_FIELDS
        if not isinstance(column, torch.Tensor):
            continue
        if column.is_nested:
            _check_row_lengths(operation, name, column, lengths)
            continue
        if column.dim() < 2 and may_be_per_sample:
            continue
        min_width = 2 if may_be_per_sample and lengths is None else width
        if column.dim() < 2 or column.shape[1] < min_width:
            expected = "(rows, tokens, ...)" if lengths is None else f"(rows, >= {min_width}, ...)"
            raise InvalidRequestError(
                f"{operation}: column {name!r} has shape {tuple(column.shape)}; expected a value "
                f"per token, {expected}"
                f"{', or one per sample, (rows,)' if may_be_per_sample else ''}"
            )


def _check_row_lengths(
    operation: str, name: str, column: torch.Tensor, lengths: Sequence[int] | None
) -> None:
    """Refuse nested rows of other lengths: a reader would pad a short one with zeros."""
    for row, (values, length) in enumerate(zip(column.unbind(), lengths or (), strict=False)):
        if values.shape[0] != length:
            raise InvalidRequestError(
                f"{operation}: row {row} of nested column {name!r} has {values.shape[0]} tokens; "
                f"expected {length}, its sequence length"
            )


def is_storable(column: object) -> bool:
    """Return whether ``column`` is a tensor or a numpy array of Python values."""
    return isinstance(column, torch.Tensor) or (
        isinstance(column, np.ndarray) and column.dtype == object
    )


def response_from_nested(
    values: torch.Tensor, response_lengths: torch.Tensor | Sequence[int]
) -> torch.Tensor:
    """Return the part of a model's output that belongs to the response, row by row.

    A model's output at a token predicts the next token, so the part for a response of length r is
    shifted by one to the left: ``row[-r - 1 : -1]``.

    Args:
        values: jagged (n, length, ...), e.g. log-probabilities over prompt and response.
        response_lengths: n lengths, or a jagged tensor with rows of those lengths (a mask).

    Returns:
        A jagged tensor (n, response length, ...).

    Raises:
        InvalidRequestError: (a ValueError) ``values`` is not nested, the number of lengths does not
            fit, or a row is not longer than its response.
    """
    if not values.is_nested:
        raise InvalidRequestError(
            f"response_from_nested: dense tensor of shape {tuple(values.shape)}; expected a "
            "nested tensor; make it with to_nested_by_length"
        )
    if isinstance(response_lengths, torch.Tensor) and response_lengths.is_nested:
        responses = [row.shape[0] for row in response_lengths.unbind()]
    else:
        responses = checked_ints("response_from_nested", "response_lengths", response_lengths)
    rows = values.unbind()
    if len(rows) != len(responses):
        raise InvalidRequestError(
            f"response_from_nested: {len(responses)} response lengths for {len(rows)} rows; "
            "expected one per row"
        )
    parts = []
    for index, (row, response) in enumerate(zip(rows, responses, strict=True)):
        stop = row.shape[0] - 1
        if response > max(stop, 0):
            raise InvalidRequestError(
                f"response_from_nested: row {index} has {row.shape[0]} tokens and a response of "
                f"{response}; expected at least one prompt token before it"
            )
        parts.append(row[stop - response : stop] if response else row[:0])
    return jagged_from_rows(parts, like=values.values())


def materialize(
    fields: TensorDictBase,
    layout: Layout = "padded",
    *,
    pad_value_dict: Mapping[str, Any] | None = None,
    pad_to_seqlen: int = 0,
) -> BatchedDataDict[Any]:
    """Return the columns of a read, or of `pack_jagged_fields`, as a batch.

    Args:
        fields: leaves are tensors and per-row Python values.
        layout: "padded" makes jagged leaves dense, right-padded to their longest row; strided
            nested leaves, whose rows differ in shape (images), stay as they are. "jagged" leaves
            every tensor as it is.
        pad_value_dict: column to its pad value; 0 if absent.
        pad_to_seqlen: with layout "padded", the minimum width in tokens to which per-token tensors
            of two or more dims are right-padded along dim 1; 0 means the longest row. The per-token
            tensors are `TOKEN_ALIGNED_FIELDS`, jagged leaves, and fields that were put jagged
            (`dataplane_core.tensors.rows.form_of`). Wider tensors are not cut.

    Returns:
        A batch with every leaf: tensors with their dtype, Python values as an object array (n,).
        None replaces a value that a transport reduced to an empty TensorDict.

    Raises:
        InvalidRequestError: (a ValueError) the layout is unknown, the width is not an int of at
            least 0, or a pad value is not a number. Or ``pad_to_seqlen`` is above 1, and
            ``advantages`` or ``sample_mask`` was put dense with shape (n, 1), which is ambiguous:
            it may be per sample, but would be padded.
        InvalidTypeError: (a TypeError) a leaf is neither a tensor nor per-row values, or ``fields``
            is no TensorDict.
    """
    if not isinstance(fields, TensorDictBase):
        raise InvalidTypeError(
            f"materialize: found {type(fields).__name__}; expected a TensorDict, as a client's "
            "get_samples returns; to read padded columns, use read_columns with layout='padded'"
        )
    if layout not in ("padded", "jagged"):
        raise InvalidRequestError(f"materialize: layout {layout!r}; expected 'padded' or 'jagged'")
    columns: dict[str, Column]
    if layout == "padded":
        padding, width = check_padding("materialize", pad_value_dict, pad_to_seqlen)
        columns = columns_of_fields(fields, pad_values=padding, width=width)
    else:
        count = fields.batch_size[0] if fields.batch_dims else 0
        columns = {
            name: leaf if isinstance(leaf, torch.Tensor) else object_column(name, leaf, count)
            for name, leaf in fields.items()
        }
    batch: BatchedDataDict[Any] = BatchedDataDict(columns)
    batch.forms = forms_of(fields)
    return batch
