"""Conversions between padded columns and the jagged rows of a store.

A column is a tensor with a row per sample, or a numpy array of Python values. Rows are only copied,
so that every dtype keeps its bits. On the CPU they are copied as slices of bytes into reused pages.
That takes a tenth of the time of torch's masks, index arithmetic and jagged operators. On a busy
machine, torch's threads also wait for each other.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any  # Any: torch does not type the attributes of nested tensors

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    is_tensor_collection,
)

from dataplane_core import pages
from dataplane_core.arguments import (
    argument_type_error,
    checked_int,
    checked_ints,
    checked_mapping,
    checked_name,
    checked_names,
    repr_with_type,
    scalar_of,
)
from dataplane_core.errors import InvalidRequestError, InvalidTypeError, MissingDataError, listed
from dataplane_core.pages import copy_slices
from dataplane_core.schema import PER_TOKEN_OR_SAMPLE_FIELDS, TOKEN_ALIGNED_FIELDS, Form
from dataplane_core.tensors.rows import (
    are_ragged,
    form_of,
    is_form_known,
    jagged_from_rows,
    set_form,
    storable_tensor,
)

Bytes = NDArray[np.uint8]
Column = torch.Tensor | NDArray[np.object_]

_PLAIN = (str, bytes, int, float, bool, type(None))
_COMMON = (*_PLAIN, list, dict)


def check_columns(
    what: str,
    columns: Mapping[str, Column],
    count: int,
    lengths: Sequence[int] | None,
    ragged: Collection[str],
) -> tuple[list[int] | None, frozenset[str]]:
    """Check that columns have ``count`` rows, and that ``lengths`` can cut the ``ragged`` ones.

    Returns:
        The lengths as plain ints, and the names of ``ragged``.

    Raises:
        InvalidRequestError: (a ValueError) a column or the lengths do not fit; the error says
            which.
    """
    checked_mapping(what, "columns", columns, "a dict of name to column")
    unordered = list(ragged) if isinstance(ragged, Set) else ragged
    names = frozenset(checked_names(what, "ragged", unordered))
    row_lengths = None if lengths is None else checked_ints(what, "lengths", lengths)
    for name, column in columns.items():
        checked_name(what, "a column's name", name)
        if not is_column(column):
            raise argument_type_error(
                what, f"column {name!r}", column, "a tensor or an object array (n,)"
            )
        rows = count_rows(column)
        if rows != count or not column.ndim:
            raise InvalidRequestError(f"{what}: column {name!r} has {rows} rows; expected {count}")
        if isinstance(column, torch.Tensor):
            storable_tensor(f"{what}: column {name!r}", column)
            continue
        for value in column:
            # A TensorDict would treat it as the leaf itself, not as one value.
            if type(value) not in _COMMON and is_tensor_collection(value):
                raise argument_type_error(
                    what, f"column {name!r}", value, "Python values; put its leaves as columns"
                )
    cut_columns = [name for name in columns if name in names]
    if not cut_columns:
        return row_lengths, names
    if row_lengths is None or len(row_lengths) != count:
        given = "no" if row_lengths is None else len(row_lengths)
        raise InvalidRequestError(
            f"{what}: {given} lengths for {count} rows of columns {listed(cut_columns)}; expected "
            "one per row"
        )
    for name in cut_columns:
        column = columns[name]
        if not isinstance(column, torch.Tensor) or column.is_nested or column.dim() < 2:
            raise InvalidRequestError(
                f"{what}: column {name!r} cannot be cut to lengths; expected a dense tensor "
                "(rows, width, ...)"
            )
        if count and max(row_lengths) > column.shape[1]:
            row = row_lengths.index(max(row_lengths))
            raise InvalidRequestError(
                f"{what}: row {row} has a length of {row_lengths[row]}; expected 0 to "
                f"{column.shape[1]}, the width of column {name!r}"
            )
    return row_lengths, names


def count_rows(column: Column) -> int:
    """Return the number of rows of a column; 0 for a scalar."""
    if isinstance(column, torch.Tensor):
        return int(column.size(0)) if column.dim() else 0  # len() fails on some nested tensors
    return len(column) if column.ndim else 0


def check_answer(
    what: str, columns: Mapping[str, Column], fields: Sequence[str], count: int
) -> None:
    """Raise a `MissingDataError` unless a read's columns have all fields, with ``count`` rows."""
    for name in fields:
        rows = count_rows(columns[name]) if name in columns else 0
        if rows != count:
            raise MissingDataError(
                f"{what}: get_samples returned {rows} rows of field {name!r}; expected {count}",
                fields=[name],
            )


def is_column(column: object) -> bool:
    """Return whether ``column`` is a tensor, or a numpy array (n,) of Python values."""
    return isinstance(column, torch.Tensor) or (
        isinstance(column, np.ndarray) and column.dtype == object and column.ndim == 1
    )


def check_padding(what: str, pad_values: object, width: object) -> tuple[dict[str, float], int]:
    """Check the padding arguments of a read.

    Raises:
        InvalidRequestError: (a ValueError) the pad values are not a dict of numbers, or the width
            is not an int of at least 0.
    """
    if pad_values is None:
        return {}, checked_int(what, "width", width)
    numbers: dict[str, float] = {}
    given = checked_mapping(what, "pad_values", pad_values, "a dict of field to number, or None")
    for name, value in given.items():
        number = scalar_of(value)
        if not isinstance(number, int | float):
            raise argument_type_error(
                what, f"pad_values[{repr_with_type(name)}]", value, "a number"
            )
        numbers[checked_name(what, "a name in pad_values", name)] = number
    return numbers, checked_int(what, "width", width)


def fields_of_columns(
    columns: Mapping[str, Column],
    count: int,
    lengths: Sequence[int] | None = None,
    ragged: Collection[str] = (),
) -> TensorDict:
    """Return columns as fields of a put, with the columns ``ragged`` cut to ``lengths``.

    Args:
        columns: checked by `check_columns`.
        count: number of rows.
        lengths: length of each row, along dim 1.
        ragged: names of the columns to cut.
    """
    leaves: dict[str, Any] = {}
    for name, column in columns.items():
        if isinstance(column, np.ndarray):
            leaves[name] = object_leaf(column)
        elif name in ragged:
            assert lengths is not None
            leaves[name] = jagged_from_padded(column, lengths)
        else:
            leaves[name] = column
    return TensorDict(leaves, batch_size=[count])


def is_per_token(name: str, form: Form | None) -> bool:
    """Return whether a field has one value per token: by its name, or because it was put jagged."""
    return name in TOKEN_ALIGNED_FIELDS or form == "ragged"


def width_of(name: str, form: Form | None, width: int) -> int | None:
    """Return the minimum width to which a field is padded.

    Returns:
        ``width`` for a field that is per token; None for a field whose rows differ in shape, which
        is not padded; 0 for any other field, which is padded to its longest row.
    """
    if is_per_token(name, form):
        return width
    return None if form == "shaped" else 0


def check_width(name: str, form: Form | None, row: Sequence[int], width: int) -> None:
    """Refuse to pad a field that may hold one value per sample: padding would corrupt it.

    Args:
        name: the field.
        form: its form; a ragged field is per token.
        row: shape of its rows, which were put dense.
        width: width to pad to.

    Raises:
        InvalidRequestError: (a ValueError) the field is ambiguous; the error names it.
    """
    if name in PER_TOKEN_OR_SAMPLE_FIELDS and form is None and width > 1 and row[:1] == (1,):
        raise InvalidRequestError(
            f"field {name!r} was put dense in rows of shape {tuple(row)} and is read {width} "
            "tokens wide; put values per sample with shape (rows,), and values per token ragged"
        )


def columns_of_fields(
    fields: TensorDictBase,
    *,
    pad_values: Mapping[str, float] | None = None,
    width: int = 0,
) -> dict[str, Column]:
    """Return the result of a read as padded columns.

    Args:
        fields: leaves are tensors, whose form `form_of` returns, and per-row Python values.
        pad_values: field to its pad value; 0 if absent.
        width: minimum size of dim 1, to which tensors that are per token (see `is_per_token`) are
            right-padded.

    Returns:
        Field to a dense tensor, to a nested tensor if its rows cannot be padded (see
        `padded_tensor`), or to an object array (n,). None replaces a value that a transport reduced
        to an empty TensorDict.

    Raises:
        TypeError: a leaf is neither a tensor nor per-row values.
        InvalidRequestError: (a ValueError) as `check_width`, if the store records forms.
    """
    count = fields.batch_size[0] if fields.batch_dims else 0
    columns: dict[str, Column] = {}
    for name, leaf in fields.items():
        if isinstance(leaf, torch.Tensor):
            form, is_known = form_of(leaf), is_form_known(leaf)
            if is_known and not leaf.is_nested:
                check_width(name, form, leaf.shape[1:], width)
            pad_value = (pad_values or {}).get(name, 0)
            column = padded_tensor(leaf, pad_value, width_of(name, form, width))
            columns[name] = set_form(column, form) if is_known else column
        else:
            columns[name] = object_column(name, leaf, count)
    return columns


def padded_tensor(tensor: torch.Tensor, pad_value: float, width: int | None) -> torch.Tensor:
    """Return ``tensor`` as a dense tensor, whose dim 1, if any, has at least the size ``width``.

    It is unchanged if ``width`` is None, or if rows differ in a dimension other than the first:
    images of different resolutions cannot be padded.
    """
    if width is None:
        return tensor
    padded = padded_from_nested(tensor, pad_value) if tensor.is_nested else tensor
    if padded.is_nested or padded.dim() < 2:
        return padded
    return pad_width(padded, width, pad_value)


def object_leaf(column: Sequence[Any] | NDArray[np.object_]) -> NonTensorStack | NonTensorData:
    """Return Python values as a leaf of a TensorDict, one per row."""
    # An array as one leaf is ambiguous: it could be one value for every row. A stack is per row,
    # but cannot be empty.
    if len(column) == 0:
        return NonTensorData(column, batch_size=[0])
    if all(type(value) in _PLAIN for value in column):
        return NonTensorStack(*column)  # the stack wraps plain values in a third of the time
    return NonTensorStack(*(NonTensorData(value) for value in column))


def object_column(name: str, leaf: Any, count: int) -> NDArray[np.object_]:
    """Return the Python values of a TensorDict's leaf as an object array (count,).

    Raises:
        TypeError: the leaf does not hold one Python value per row.
    """
    if isinstance(leaf, NonTensorData):
        # Not read from a store: the leaf holds the array itself, or one value for all rows.
        data = leaf.data
        per_row = isinstance(data, np.ndarray | list | tuple) and len(data) == count
        values = list(data) if per_row else [data] * count
    elif isinstance(leaf, LazyStackedTensorDict):
        values = [_object_value(name, row) for row in leaf.tensordicts]
    else:
        raise InvalidTypeError(
            f"field {name!r} is a {type(leaf).__name__}; expected a tensor or per-row Python values"
        )
    return object_array(values)


def object_array(values: Sequence[Any]) -> NDArray[np.object_]:
    """Return an object array (n,) of Python values."""
    column = np.empty(len(values), dtype=object)
    column[:] = values  # element by element: np.array would convert nested sequences
    return column


def _object_value(name: str, row: Any) -> Any:
    if isinstance(row, NonTensorData):
        return row.data
    if is_tensor_collection(row) and row.batch_dims == 0 and row.is_empty():
        return None
    raise InvalidTypeError(
        f"field {name!r} has a row of {type(row).__name__}; expected a Python value"
    )


def jagged_from_padded(padded: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Return a jagged tensor whose row i is ``padded[i, : lengths[i]]``."""
    features = padded.shape[2:]
    if padded.device.type != "cpu" or padded.requires_grad or not padded.numel():
        rows = [row[:length] for row, length in zip(padded, lengths, strict=True)]
        return jagged_from_rows(rows, like=padded[0:0].reshape(0, *features))
    # Lengths 3 and 1, width 4:   padded  a b c . | d . . .   rows begin at 0 and 4 (stride)
    #                             values  a b c d             rows begin at 0 and 3 (offsets)
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    step = padded.element_size() * math.prod(features)
    stride = padded.shape[1] * step
    values = pages.empty(int(offsets[-1]) * step)
    begins = (offsets[:-1] * step).tolist()
    starts = range(0, len(lengths) * stride, stride)
    copy_slices(values, begins, bytes_of(padded), starts, [length * step for length in lengths])
    return torch.nested.nested_tensor_from_jagged(
        tensor_on(values, padded.dtype, (int(offsets[-1]), *features)),
        torch.from_numpy(offsets),
        min_seqlen=min(lengths),
        max_seqlen=max(lengths),
    )


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """Return the bytes of a dense CPU tensor, row by row."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # A contiguous tensor of one element may have any strides, which view() refuses.
    raw: Bytes = plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy()
    return raw


def tensor_on(raw: Bytes, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Return a tensor that views the memory of ``raw``."""
    if not raw.size:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.from_numpy(raw).view(dtype).view(tuple(shape))


def padded_from_nested(nested: torch.Tensor, pad_value: float) -> torch.Tensor:
    """Return the rows of ``nested`` as one dense tensor (n, longest, ...), right-padded.

    If they differ in a dimension other than the first, return ``nested``.
    """
    if _is_plain_jagged(nested):
        return _padded_from_jagged(nested, pad_value)
    rows = nested.unbind()
    if not rows:
        features = nested.values().shape[1:] if nested.layout == torch.jagged else ()
        return torch.empty((0, 0, *features), dtype=nested.dtype, device=nested.device)
    if not are_ragged(rows):
        return nested
    longest = max(row.shape[0] for row in rows)
    pad_value = checked_pad_value(pad_value, nested.dtype)
    padded = rows[0].new_full((len(rows), longest, *rows[0].shape[1:]), pad_value)
    for index, row in enumerate(rows):
        padded[index, : row.shape[0]] = row
    return padded


def _is_plain_jagged(nested: Any) -> bool:
    """Return whether rows are contiguous on the CPU and ragged in their first dimension."""
    return bool(
        nested.layout == torch.jagged
        and nested.device.type == "cpu"
        and not nested.requires_grad
        and nested.lengths() is None
        and nested._ragged_idx == 1
        and nested.values().numel()
    )


def _padded_from_jagged(nested: Any, pad_value: float) -> torch.Tensor:
    values, bounds = nested.values(), nested.offsets().numpy()
    lengths = np.diff(bounds)
    features = values.shape[1:]
    step = values.element_size() * math.prod(features)
    sizes = lengths * step
    padded = Padded(sizes, features, values.dtype, int(lengths.max()), pad_value)
    copy_slices(
        padded.raw, padded.begins, bytes_of(values), (bounds[:-1] * step).tolist(), sizes.tolist()
    )
    return padded.tensor


class Padded:
    """A tensor (n, width, *features) with its padding filled in; the caller fills the rows.

    Args:
        sizes: bytes of each row without padding, a multiple of one token's bytes.
        features: shape of a row after its first dimension; no size may be 0.
        dtype: dtype of the tensor.
        width: width of the rows, above 0 and at least that of the longest row.
        pad_value: value of the padding.

    Attributes:
        tensor: the tensor.
        raw: its memory.
        begins: offset of each row in ``raw``.
    """

    def __init__(
        self,
        sizes: NDArray[np.int64],
        features: Sequence[int],
        dtype: torch.dtype,
        width: int,
        pad_value: float,
    ) -> None:
        item = math.prod(features)
        stride = width * dtype.itemsize * item
        self.raw = pages.empty(len(sizes) * stride)
        self.tensor = tensor_on(self.raw, dtype, (len(sizes), width, *features))
        self.begins = range(0, len(sizes) * stride, stride)
        # Row i:  begins[i] |<-- sizes[i] -->|<-- pad_sizes[i] -->| begins[i + 1]
        # Only the rows' ends are filled: filling everything would write most bytes twice.
        pad_sizes = (stride - sizes).tolist()
        pad_value = checked_pad_value(pad_value, dtype)
        padding = bytes_of(torch.full((max(pad_sizes) // dtype.itemsize,), pad_value, dtype=dtype))
        ends = (np.arange(len(sizes)) * stride + sizes).tolist()
        copy_slices(self.raw, ends, padding, [0] * len(pad_sizes), pad_sizes)


def pad_width(tensor: torch.Tensor, width: int, pad_value: float) -> torch.Tensor:
    """Return ``tensor`` (n, w, ...) right-padded along dim 1 to at least ``width``.

    Raises:
        InvalidRequestError: (a ValueError) as `checked_pad_value`.
    """
    pad_value = checked_pad_value(pad_value, tensor.dtype)
    if tensor.shape[1] >= width:
        return tensor
    padded = tensor.new_full((tensor.shape[0], width, *tensor.shape[2:]), pad_value)
    padded[:, : tensor.shape[1]] = tensor
    return padded


def checked_pad_value(pad_value: float, dtype: torch.dtype) -> float:
    """Return ``pad_value`` if ``dtype`` can hold it; torch would truncate 1.5 in integers.

    Raises:
        InvalidRequestError: (a ValueError) the dtype cannot hold it.
    """
    if pad_value == 0:
        return pad_value
    try:
        held: Any = torch.full((), pad_value, dtype=dtype).item()
    except (RuntimeError, OverflowError):
        held = None
    inexact = dtype.is_floating_point or dtype.is_complex
    if held is None or (not inexact and held != pad_value):
        raise InvalidRequestError(f"pad value {pad_value}; expected a number that {dtype} can hold")
    return pad_value
