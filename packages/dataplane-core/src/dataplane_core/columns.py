"""Padded columns to the jagged rows that a store keeps, and back.

A column is a tensor with a row per sample, or a numpy array of Python values. Rows are copied with
plain copies, never computed with, so that every dtype (bfloat16, float16, bool and the integers)
keeps its bits. In main memory they are copied as slices of bytes, into pages that are used again:
that costs a tenth of torch's masks, index arithmetic and jagged operators, which also split their
work over threads that wait for each other on a busy machine.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any  # Any: torch does not type what only nested tensors have

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
    checked_int,
    checked_ints,
    checked_mapping,
    checked_name,
    checked_names,
    refused,
    scalar_of,
    shown,
)
from dataplane_core.errors import InvalidRequestError, InvalidTypeError, listed
from dataplane_core.rows import are_ragged, form_of, jagged_from_rows, storable_tensor
from dataplane_core.schema import PER_SAMPLE_TOO, TOKEN_ALIGNED_FIELDS, Form
from dataplane_core.slices import Slices, copy_slices

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
    """Refuse columns that do not fit ``count`` samples or the lengths that they are to be cut to.

    Returns:
        The lengths as plain ints, and the names of ``ragged``.

    Raises:
        InvalidRequestError: (a ValueError) naming the column or the lengths.
    """
    checked_mapping(what, "columns", columns, "a dict of name to column")
    unordered = list(ragged) if isinstance(ragged, Set) else ragged
    names = frozenset(checked_names(what, "ragged", unordered))
    cuts = None if lengths is None else checked_ints(what, "lengths", lengths)
    for name, column in columns.items():
        checked_name(what, "a column's name", name)
        if not is_column(column):
            raise refused(what, f"column {name!r}", column, "a tensor or an object array (n,)")
        rows = count_rows(column)
        if rows != count or not column.ndim:
            raise InvalidRequestError(f"{what}: column {name!r} has {rows} rows; expected {count}")
        if isinstance(column, torch.Tensor):
            storable_tensor(f"{what}: column {name!r}", column)
            continue
        for value in column:
            # As the leaf of a TensorDict it would be taken for the column itself.
            if type(value) not in _COMMON and is_tensor_collection(value):
                raise refused(
                    what, f"column {name!r}", value, "Python values; put its leaves as columns"
                )
    cut = [name for name in columns if name in names]
    if not cut:
        return cuts, names
    if cuts is None or len(cuts) != count:
        found = "no" if cuts is None else len(cuts)
        raise InvalidRequestError(
            f"{what}: {found} lengths for {count} rows of columns {listed(cut)}; expected one each"
        )
    for name in cut:
        column = columns[name]
        if not isinstance(column, torch.Tensor) or column.is_nested or column.dim() < 2:
            raise InvalidRequestError(
                f"{what}: column {name!r} cannot be cut to lengths; expected a dense tensor "
                "(rows, width, ...)"
            )
        if count and max(cuts) > column.shape[1]:
            row = cuts.index(max(cuts))
            raise InvalidRequestError(
                f"{what}: row {row} has a length of {cuts[row]}; expected 0 to {column.shape[1]}, "
                f"the width of column {name!r}"
            )
    return cuts, names


def count_rows(column: Column) -> int:
    """Number of rows of a column; 0 of a scalar."""
    if isinstance(column, torch.Tensor):
        return int(column.size(0)) if column.dim() else 0  # len() fails on some nested tensors
    return len(column) if column.ndim else 0


def is_column(column: object) -> bool:
    """Whether a put takes ``column``: a tensor, or a numpy array (n,) of Python values."""
    return isinstance(column, torch.Tensor) or (
        isinstance(column, np.ndarray) and column.dtype == object and column.ndim == 1
    )


def check_padding(what: str, pad_values: object, width: object) -> tuple[dict[str, float], int]:
    """What a padded read asks for.

    Raises:
        InvalidRequestError: (a ValueError) pad values are no dict of numbers, or the width is no
            int of at least 0.
    """
    if pad_values is None:
        return {}, checked_int(what, "width", width)
    numbers: dict[str, float] = {}
    given = checked_mapping(what, "pad_values", pad_values, "a dict of field to number, or None")
    for name, value in given.items():
        number = scalar_of(value)
        if not isinstance(number, int | float):
            raise refused(what, f"pad_values[{shown(name)}]", value, "a number")
        numbers[checked_name(what, "a name in pad_values", name)] = number
    return numbers, checked_int(what, "width", width)


def fields_of_columns(
    columns: Mapping[str, Column],
    count: int,
    lengths: Sequence[int] | None = None,
    ragged: Collection[str] = (),
) -> TensorDict:
    """Columns as the fields that a put takes; those in ``ragged`` cut to ``lengths``.

    Args:
        columns: checked by `check_columns`.
        count: number of rows.
        lengths: of each row, along dim 1.
        ragged: the columns to cut.
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
    """Whether rows of a field run along the tokens: by its name, or because it was put jagged."""
    return name in TOKEN_ALIGNED_FIELDS or form == "ragged"


def width_of(name: str, form: Form | None, width: int) -> int | None:
    """The width to pad a field to, given that of the batch.

    Returns:
        ``width`` for a field that is per token; 0, the longest row, for any other; None for one
        whose rows have shapes of their own, which are not padded at all.
    """
    if is_per_token(name, form):
        return width
    return None if form == "shaped" else 0


def check_width(name: str, form: Form | None, row: Sequence[int], width: int) -> None:
    """Refuse to pad what may be one value per sample: with zeros it would read as no advantage.

    Args:
        name: the field.
        form: its form; ragged rows of one token are no doubt per token.
        row: shape of its rows, which were put dense.
        width: to pad to.

    Raises:
        InvalidRequestError: (a ValueError) naming the field.
    """
    if name in PER_SAMPLE_TOO and form is None and width > 1 and row[:1] == (1,):
        raise InvalidRequestError(
            f"field {name!r} was put dense in rows of shape {tuple(row)} and is read {width} "
            "tokens wide; put one value per sample as (rows,), or values per token ragged"
        )


def columns_of_fields(
    fields: TensorDictBase,
    *,
    pad_values: Mapping[str, float] | None = None,
    width: int = 0,
    forms: Mapping[str, Form] | None = None,
) -> dict[str, Column]:
    """Fields as a get returns them, as padded columns.

    Args:
        fields: leaves are tensors and per-row Python values.
        pad_values: field to its pad value; 0 if absent.
        width: tensors that are per token, see `is_per_token`, are right-padded along dim 1 to at
            least this.
        forms: field to its form, as the store keeps it; None if only the leaves can tell.

    Returns:
        Field to a dense tensor, to a nested tensor if its rows cannot be padded (see
        `padded_tensor`), or to an object array (n,), in which None stands for a value that its
        transport stripped to an empty TensorDict.

    Raises:
        TypeError: if a leaf is neither a tensor nor per-row values.
        InvalidRequestError: (a ValueError) as `check_width`, with ``forms``.
    """
    count = fields.batch_size[0] if fields.batch_dims else 0
    columns: dict[str, Column] = {}
    for name, leaf in fields.items():
        if isinstance(leaf, torch.Tensor):
            form = form_of(leaf) if forms is None else forms.get(name)
            if forms is not None and not leaf.is_nested:
                check_width(name, form, leaf.shape[1:], width)
            pad_value = (pad_values or {}).get(name, 0)
            columns[name] = padded_tensor(leaf, pad_value, width_of(name, form, width))
        else:
            columns[name] = object_column(name, leaf, count)
    return columns


def padded_tensor(tensor: torch.Tensor, pad_value: float, width: int | None) -> torch.Tensor:
    """``tensor`` dense, and from two dims on at least ``width`` wide along dim 1.

    Unchanged if ``width`` is None, or if rows differ elsewhere than in their first dimension:
    images of two resolutions are not images of one.
    """
    if width is None:
        return tensor
    padded = padded_from_nested(tensor, pad_value) if tensor.is_nested else tensor
    if padded.is_nested or padded.dim() < 2:
        return padded
    return pad_width(padded, width, pad_value)


def object_leaf(column: NDArray[np.object_]) -> NonTensorStack | NonTensorData:
    """Python values as a leaf of a TensorDict, one per row."""
    # An array as one leaf is ambiguous: its values could belong to each row. A stack is per row,
    # but cannot be empty.
    if len(column) == 0:
        return NonTensorData(column, batch_size=[0])
    if all(type(value) in _PLAIN for value in column):
        return NonTensorStack(*column)  # wraps them itself, in a third of the time
    return NonTensorStack(*(NonTensorData(value) for value in column))


def object_column(name: str, leaf: Any, count: int) -> NDArray[np.object_]:
    """The Python values of a TensorDict's leaf as an object array (count,).

    Raises:
        TypeError: if the leaf or a row of it is something else.
    """
    if isinstance(leaf, NonTensorData):
        # Not been through a store: the leaf holds the array itself, or one value for all rows.
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
    """An array (n,) of Python values, whatever they are."""
    column = np.empty(len(values), dtype=object)
    column[:] = values  # element by element: np.array would look inside sequences
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
    """A jagged tensor of each row's first ``lengths[i]`` values; ``padded`` is (n, width, ...)."""
    slices = slices_of_padded(padded, lengths)
    features = padded.shape[2:]
    if slices is None or not padded.numel():
        rows = [row[:length] for row, length in zip(padded, lengths, strict=True)]
        return jagged_from_rows(rows, like=padded[0:0].reshape(0, *features))
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return torch.nested.nested_tensor_from_jagged(
        tensor_on(slices.joined(), padded.dtype, (int(offsets[-1]), *features)),
        torch.from_numpy(offsets),
        min_seqlen=min(lengths),
        max_seqlen=max(lengths),
    )


def slices_of_padded(padded: torch.Tensor, lengths: Sequence[int]) -> Slices | None:
    """Where the first ``lengths[i]`` values of each row lie in memory.

    None if the tensor is on a device or its gradient is wanted: its bytes alone will not do.
    """
    if padded.device.type != "cpu" or padded.requires_grad:
        return None
    step = padded.element_size() * math.prod(padded.shape[2:])
    stride = padded.shape[1] * step
    starts = range(0, len(lengths) * stride, stride) if stride else [0] * len(lengths)
    return Slices(_bytes(padded), starts, [length * step for length in lengths])


def _bytes(tensor: torch.Tensor) -> Bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).contiguous()
    raw: Bytes = plain.view(torch.uint8).numpy()
    return raw


def tensor_on(raw: Bytes, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """A tensor on the memory of ``raw``."""
    if not raw.size:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.from_numpy(raw).view(dtype).view(tuple(shape))


def padded_from_nested(nested: torch.Tensor, pad_value: float) -> torch.Tensor:
    """The rows of ``nested`` in one dense tensor (n, longest, ...), right-padded.

    ``nested`` itself if they differ in another dimension than their first.
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
    for place, row in enumerate(rows):
        padded[place, : row.shape[0]] = row
    return padded


def _is_plain_jagged(nested: Any) -> bool:
    """Whether the rows lie one after the other in main memory, ragged in their first dimension."""
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
        padded.raw, padded.begins, _bytes(values), (bounds[:-1] * step).tolist(), sizes.tolist()
    )
    return padded.tensor


class Padded:
    """A tensor (n, width, *features) whose rows end in padding and are still to be filled.

    Args:
        sizes: bytes that each row has besides padding, a whole number of ``features``.
        features: what follows the rows' first dimension; not empty in any dimension.
        dtype: of the tensor.
        width: of the rows, at least that of the longest, above 0.
        pad_value: goes where a row's own bytes end.

    Attributes:
        tensor: the tensor.
        raw: its memory.
        begins: where each row begins in ``raw``.
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
        rests = (stride - sizes).tolist()
        # Only the rows' ends are filled: writing every byte twice costs more than many copies.
        pad_value = checked_pad_value(pad_value, dtype)
        padding = _bytes(torch.full((max(rests) // dtype.itemsize,), pad_value, dtype=dtype))
        after = (np.arange(len(sizes)) * stride + sizes).tolist()
        copy_slices(self.raw, after, padding, [0] * len(rests), rests)


def pad_width(tensor: torch.Tensor, width: int, pad_value: float) -> torch.Tensor:
    """``tensor`` (n, w, ...) right-padded along dim 1 to ``width``; unchanged if it is as wide.

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
    """``pad_value`` if ``dtype`` holds it; torch cuts 1.5 to 1 in integers.

    Raises:
        InvalidRequestError: (a ValueError) if it does not.
    """
    if pad_value == 0:
        return pad_value
    try:
        held: Any = torch.full((), pad_value, dtype=dtype).item()
    except (RuntimeError, OverflowError):
        held = None
    inexact = dtype.is_floating_point or dtype.is_complex
    if held is None or (not inexact and held != pad_value):
        raise InvalidRequestError(f"pad value {pad_value}; expected a number that {dtype} holds")
    return pad_value
