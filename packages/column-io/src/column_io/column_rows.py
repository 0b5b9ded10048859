"""Row operations on one column of a batch, for every type of column.

A column is a tensor (dense or nested), a numpy array, or a list with one Python value per row.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any  # Any: a column is a tensor, an array or a list of the caller's values

import numpy as np
import torch

from dataplane_core import InvalidRequestError
from dataplane_core.tensors.columns import pad_width
from dataplane_core.tensors.rows import are_ragged, jagged_from_rows, shaped_from_rows


def count_rows(name: str, column: Any) -> int:
    """Return the number of rows of ``column``.

    Raises:
        InvalidRequestError: (a ValueError) the column is a scalar, or has another type than
            a tensor, an array or a list.
    """
    if isinstance(column, torch.Tensor | np.ndarray):
        if column.ndim == 0:
            raise InvalidRequestError(
                f"column {name!r}: a scalar; expected one row per sample along dim 0"
            )
        # Nested tensors of strided layout have no shape.
        return int(column.size(0) if isinstance(column, torch.Tensor) else column.shape[0])
    if isinstance(column, str | bytes) or not isinstance(column, Sequence):
        raise InvalidRequestError(
            f"column {name!r}: found {type(column).__name__}; expected a tensor, an array or a "
            "list with one value per row"
        )
    return len(column)


def common_row_count(operation: str, columns: Mapping[str, Any]) -> int:
    """Return the number of rows that all columns have; 0 without columns."""
    counts = {name: count_rows(name, column) for name, column in columns.items()}
    if len(set(counts.values())) > 1:
        rows = ", ".join(f"{name}: {count}" for name, count in list(counts.items())[:10])
        raise InvalidRequestError(f"{operation}: columns differ in their number of rows ({rows})")
    return next(iter(counts.values()), 0)


def dense_width(column: Any, dim: int) -> int | None:
    """Return the size of a dense tensor along ``dim``; None if it has no such dimension."""
    dense = isinstance(column, torch.Tensor) and not column.is_nested and column.dim() > dim
    return int(column.shape[dim]) if dense else None


def take_rows(column: Any, indices: Sequence[int]) -> Any:
    """Return the rows at ``indices``, in that order; tensors and arrays are copied."""
    if isinstance(column, torch.Tensor):
        if column.is_nested:
            rows = column.unbind()
            return _nested_from_rows([rows[i] for i in indices], like=column)
        return column.index_select(
            0, torch.tensor(indices, dtype=torch.int64, device=column.device)
        )
    if isinstance(column, np.ndarray):
        return column[np.asarray(indices, dtype=np.int64)]
    return [column[i] for i in indices]


def slice_rows(column: Any, start: int, end: int) -> Any:
    """Return the rows in ``[start, end)``; dense tensors and arrays are views."""
    if isinstance(column, torch.Tensor) and column.is_nested:
        return _nested_from_rows(column.unbind()[start:end], like=column)
    return column[start:end]


def repeat_rows(column: Any, times: int) -> Any:
    """Return each row ``times`` times consecutively; Python values are deep copies."""
    if isinstance(column, torch.Tensor):
        if column.is_nested:
            rows = [row for row in column.unbind() for _ in range(times)]
            return _nested_from_rows(rows, like=column)
        return column.repeat_interleave(times, dim=0)
    if isinstance(column, np.ndarray):
        repeated = column.repeat(times, axis=0)
        if column.dtype == object:
            # A deep copy of the array would let all repeats of a value share one copy.
            repeated[:] = [copy.deepcopy(value) for value in repeated]
        return repeated
    return [copy.deepcopy(value) for value in column for _ in range(times)]


def join_columns(name: str, parts: Sequence[Any], pad_value: float, *, shaped: bool = False) -> Any:
    """Return the concatenation of ``parts``.

    Dense tensors of two or more dimensions are right-padded along dim 1 to the widest part. The
    result is nested if a part is nested, or if the column is ``shaped`` and rows differ in shape.
    A nested result is strided if a part is strided, or if rows differ in more than their first
    dimension; otherwise it is jagged.
    """
    for part in parts:
        count_rows(name, part)
    if all(isinstance(part, torch.Tensor) for part in parts):
        return _join_tensors(name, parts, pad_value, shaped)
    if all(isinstance(part, np.ndarray) for part in parts):
        return _join_arrays(name, parts)
    if any(isinstance(part, torch.Tensor | np.ndarray) for part in parts):
        kinds = ", ".join(sorted({type(part).__name__ for part in parts}))
        raise InvalidRequestError(f"from_batches: column {name!r} is of different kinds: {kinds}")
    return [value for part in parts for value in part]


def _join_arrays(name: str, parts: Sequence[np.ndarray]) -> np.ndarray:
    dtypes = {part.dtype for part in parts}
    # The dtype of text contains its length, so only the kind of text dtypes must agree.
    if len({dtype.kind if dtype.kind in "US" else dtype for dtype in dtypes}) > 1:
        names = ", ".join(sorted(map(str, dtypes)))
        raise InvalidRequestError(f"from_batches: column {name!r} has several dtypes: {names}")
    if len({part.shape[1:] for part in parts}) > 1:
        listed = ", ".join(str(part.shape) for part in parts[:10])
        raise InvalidRequestError(
            f"from_batches: column {name!r} is an array of shapes {listed}; expected shapes that "
            "differ in dim 0 only"
        )
    return np.concatenate(parts)


def _join_tensors(
    name: str, parts: Sequence[torch.Tensor], pad_value: float, shaped: bool
) -> torch.Tensor:
    dtypes = {part.dtype for part in parts}
    if len(dtypes) > 1:
        names = ", ".join(sorted(str(dtype) for dtype in dtypes))
        raise InvalidRequestError(f"from_batches: column {name!r} has several dtypes: {names}")
    nested = [part for part in parts if part.is_nested]
    if not nested and shaped and len({part.shape[1:] for part in parts}) > 1:
        return shaped_from_rows([row for part in parts for row in part.unbind()])
    if nested:
        rows = [row for part in parts for row in part.unbind()]
        jagged = all(part.layout == torch.jagged for part in nested)
        if rows and not (jagged and are_ragged(rows)):
            return shaped_from_rows(rows)
        return _nested_from_rows(rows, like=nested[0])
    shapes = {part.shape[2:] if part.dim() > 1 else None for part in parts}
    if len(shapes) > 1:
        listed = ", ".join(str(tuple(part.shape)) for part in parts[:10])
        raise InvalidRequestError(
            f"from_batches: column {name!r} has shapes {listed}; expected shapes that differ in "
            "dims 0 and 1 only"
        )
    if parts[0].dim() < 2:
        return torch.cat(list(parts))
    width = max(part.shape[1] for part in parts)
    return torch.cat([pad_width(part, width, pad_value) for part in parts])


def _nested_from_rows(rows: Sequence[torch.Tensor], *, like: torch.Tensor) -> torch.Tensor:
    """Return a nested tensor of ``rows`` in the layout of ``like``.

    Strided nested tensors hold rows that differ in more than their first dimension.
    """
    if like.layout == torch.jagged:
        return jagged_from_rows(rows, like=like.values())
    return torch.nested.nested_tensor(
        list(rows), layout=torch.strided, dtype=like.dtype, device=like.device
    )
