"""Padded columns to the jagged form that is stored, and back.

Stored per row, a token column costs what its rows hold and not what the widest row of the batch
needs. Which columns are per token is a matter of their name (`TOKEN_ALIGNED_FIELDS`): a shape of
(rows, width) alone does not tell a mask over tokens from an image feature.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any  # Any: leaves are tensors or the caller's own Python values

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from column_io.batched_data_dict import BatchedDataDict
from column_io.column_rows import count_rows
from dataplane_core import InvalidRequestError, InvalidTypeError, Layout
from dataplane_core.arguments import checked_ints
from dataplane_core.columns import (
    Column,
    check_padding,
    columns_of_fields,
    fields_of_columns,
    jagged_from_padded,
    object_column,
)
from dataplane_core.rows import forms_of, jagged_from_rows
from dataplane_core.schema import PER_SAMPLE_TOO, TOKEN_ALIGNED_FIELDS


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
        InvalidRequestError: (a ValueError) if ``padded`` has no width, or the number of lengths or
            one of them does not fit.
    """
    cuts = checked_ints("to_nested_by_length", "lengths", lengths)
    if padded.dim() < 2:
        raise InvalidRequestError(
            f"to_nested_by_length: tensor of shape {tuple(padded.shape)}; expected (rows, width, "
            "...)"
        )
    if len(cuts) != padded.shape[0]:
        raise InvalidRequestError(
            f"to_nested_by_length: {len(cuts)} lengths for {padded.shape[0]} rows; expected one "
            "per row"
        )
    if cuts and max(cuts) > padded.shape[1]:
        raise InvalidRequestError(
            f"to_nested_by_length: row {cuts.index(max(cuts))} has a length of {max(cuts)}; "
            f"expected 0 to the width {padded.shape[1]}"
        )
    return jagged_from_padded(padded, cuts)


def pack_per_token_field(
    values: torch.Tensor, lengths: torch.Tensor | Sequence[int]
) -> torch.Tensor:
    """`to_nested_by_length` where ``values`` can be cut, else ``values`` as they are.

    Cannot be cut: a tensor that is nested already, of one dimension, with another number of rows,
    or narrower than the longest row.

    Raises:
        InvalidRequestError: (a ValueError) if a length is no int of at least 0.
    """
    cuts = checked_ints("pack_per_token_field", "lengths", lengths)
    return to_nested_by_length(values, cuts) if _can_be_cut(values, cuts) else values


def _can_be_cut(values: torch.Tensor, cuts: Sequence[int]) -> bool:
    if values.is_nested or values.dim() < 2 or values.shape[0] != len(cuts):
        return False
    return int(values.shape[1]) >= max(cuts, default=0)


def pack_jagged_fields(
    fields: Mapping[str, torch.Tensor | np.ndarray],
    lengths: torch.Tensor | Sequence[int] | None = None,
    *,
    token_aligned_fields: Collection[str] = TOKEN_ALIGNED_FIELDS,
) -> TensorDict:
    """The TensorDict that a put takes, token columns jagged.

    Args:
        fields: column name to a tensor or an object array, all with the same number of rows.
        lengths: tokens per row; None leaves every column dense.
        token_aligned_fields: the columns to cut to ``lengths``. Wider ones (padded for sequence
            parallelism) are cut; what cannot be cut stays dense, see `pack_per_token_field`.

    Returns:
        A TensorDict whose batch size is the number of rows.

    Raises:
        InvalidTypeError: (a TypeError) if a column is neither a tensor nor an object array.
        InvalidRequestError: (a ValueError) if the columns differ in their number of rows, or a
            length is no int of at least 0.
    """
    where = "pack_jagged_fields"
    count = count_columns(where, fields)
    cuts = None if lengths is None else checked_ints(where, "lengths", lengths)
    ragged = ragged_columns(fields, cuts, token_aligned_fields)
    return fields_of_columns(fields, count, cuts, ragged)


def count_columns(where: str, fields: Mapping[str, Column]) -> int:
    """The number of rows that all columns have.

    Raises:
        InvalidTypeError: (a TypeError) if a column is neither a tensor nor an object array.
        InvalidRequestError: (a ValueError) if the columns differ in their number of rows.
    """
    counts: dict[str, int] = {}
    for name, column in fields.items():
        if not is_storable(column):
            kind = getattr(column, "dtype", None) or type(column).__name__
            raise InvalidTypeError(
                f"{where}: column {name!r} is {kind}; expected a torch.Tensor or a numpy array of "
                "dtype object"
            )
        counts[name] = count_rows(name, column)
    if len(set(counts.values())) > 1:
        found = ", ".join(f"{name}: {count}" for name, count in list(counts.items())[:10])
        raise InvalidRequestError(f"{where}: columns differ in their number of rows ({found})")
    return next(iter(counts.values()), 0)


def ragged_columns(
    fields: Mapping[str, Column],
    lengths: Sequence[int] | None,
    token_aligned_fields: Collection[str] = TOKEN_ALIGNED_FIELDS,
) -> list[str]:
    """Return the columns to cut to ``lengths``: those per token that can be cut."""
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
    where: str, fields: Mapping[str, Column], lengths: Sequence[int] | None
) -> None:
    """Refuse token-aligned columns that have no axis of tokens.

    `PER_SAMPLE_TOO` may have one value per sample instead, with shape (n,). Without lengths their
    shape (n, 1) may mean either, and a reader would pad it with zeros.

    Raises:
        InvalidRequestError: (a ValueError) if a column has no dim 1, or one that is narrower than
            the longest row.
    """
    width = 0 if lengths is None else max(lengths, default=0)
    for name in TOKEN_ALIGNED_FIELDS.intersection(fields):
        column, either = fields[name], name in PER_SAMPLE_TOO
        if not isinstance(column, torch.Tensor) or column.is_nested:
            continue
        if column.dim() < 2 and either:
            continue
        longest = 2 if either and lengths is None else width
        if column.dim() < 2 or column.shape[1] < longest:
            expected = "(rows, tokens, ...)" if lengths is None else f"(rows, >= {longest}, ...)"
            raise InvalidRequestError(
                f"{where}: column {name!r} has shape {tuple(column.shape)}; expected a value per "
                f"token, {expected}{', or one per sample, (rows,)' if either else ''}"
            )


def is_storable(column: object) -> bool:
    """Whether a put takes ``column``: a tensor, or a numpy array of Python values."""
    return isinstance(column, torch.Tensor) or (
        isinstance(column, np.ndarray) and column.dtype == object
    )


def response_from_nested(
    values: torch.Tensor, response_lengths: torch.Tensor | Sequence[int]
) -> torch.Tensor:
    """The part of a model's output that belongs to the response, row by row.

    A model's output at a token is about the next token, so the response's part is its length's last
    values shifted one to the left: ``row[-r - 1 : -1]``.

    Args:
        values: jagged (n, length, ...), e.g. log-probabilities over prompt and response.
        response_lengths: n lengths, or a jagged tensor with rows of those lengths (a mask).

    Returns:
        A jagged tensor (n, response length, ...).

    Raises:
        InvalidRequestError: (a ValueError) if ``values`` is not nested, the number of lengths does
            not fit, or a row is not longer than its response.
    """
    if not values.is_nested:
        raise InvalidRequestError(
            f"response_from_nested: dense tensor of shape {tuple(values.shape)}; expected a "
            "nested one, make it with to_nested_by_length"
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
    for place, (row, response) in enumerate(zip(rows, responses, strict=True)):
        stop = row.shape[0] - 1
        if response > max(stop, 0):
            raise InvalidRequestError(
                f"response_from_nested: row {place} has {row.shape[0]} tokens and a response of "
                f"{response}; expected at least one token of prompt before it"
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
    """Columns to compute with, from what a read returned or `pack_jagged_fields` made.

    Args:
        fields: leaves are tensors and per-row Python values.
        layout: "padded" makes jagged leaves dense, right-padded to their longest row; nested ones
            of strided layout hold rows of other shapes (images) and stay as they are. "jagged"
            leaves every tensor as it is.
        pad_value_dict: column to its pad value; 0 if absent.
        pad_to_seqlen: with layout "padded" and above 0, tensors of two or more dims that are per
            token, those that were dense included, are right-padded along dim 1 to this width, in
            tokens. Per token are `TOKEN_ALIGNED_FIELDS` and jagged leaves. Wider ones are not cut.

    Returns:
        A batch with every leaf: tensors with their dtype, Python values as an object array (n,), in
        which None stands for a value that its transport stripped to an empty TensorDict.

    Raises:
        InvalidRequestError: (a ValueError) on an unknown layout, a width that is no int of at least
            0, or a pad value that is no number.
        InvalidTypeError: (a TypeError) if a leaf is neither a tensor nor per-row values.
    """
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
