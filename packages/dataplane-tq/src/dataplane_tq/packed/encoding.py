"""Encodes the fields of a put as flat buffers.

The cost must be per byte, not per row: dense and jagged tensors are encoded as views of their
storage and copied by a few memcpys. numpy copies them, because torch would split each copy over
threads, which on a busy machine wait for each other longer than the copy takes.

A padded column with lengths [3, 1] is not cut before the copy; its slices are::

    column   a b c 0        slices of flat = a b c 0 d 0 0 0    starts [0, 4], sizes [3, 1]
             d 0 0 0        in the unit    = a b c d            layout.ends [3, 4]  (times itemsize)

Such a column of six rows in two blocks, rows 0..3 and 4..5, is written from slices 0..3 and 4..5.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any  # Any: a leaf of a TensorDict, a row of an object field

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase

from dataplane_core import InvalidTypeError
from dataplane_core.tensors.columns import Column, bytes_of, count_rows, jagged_from_padded
from dataplane_core.tensors.object_codec import encode_object
from dataplane_core.tensors.rows import OBJECT, checked_leaves
from dataplane_tq.packed.layout import Block, FieldLayout
from dataplane_tq.packed.slices import Slices

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class EncodedField:
    """Encoded field of a put.

    Attributes:
        layout: layout of the rows.
        slices: the field's flat buffer, as one slice or as one slice per row. They may share memory
            with the put's tensors.
    """

    layout: FieldLayout
    slices: Slices

    def rows(self, first: int, count: int) -> Slices:
        """Return the bytes of ``count`` rows from row ``first`` on, without a copy."""
        layout, slices = self.layout, self.slices
        if count == layout.rows:
            return slices
        if len(slices.sizes) == layout.rows:
            rows = slice(first, first + count)
            return Slices(slices.flat, slices.starts[rows], slices.sizes[rows])
        start = layout.row_range(first)[0]
        return Slices(slices.flat, [start], [layout.row_range(first + count - 1)[1] - start])


def writes(
    blocks: Iterable[Block], fields: Iterable[EncodedField]
) -> dict[str, list[tuple[int, Slices]]]:
    """Return per unit the offsets and bytes to write, so that ``blocks`` hold ``fields``."""
    encoded = {field.layout.name: field for field in fields}
    by_unit: dict[str, list[tuple[int, Slices]]] = {}
    for block in blocks:
        if block.layout.nbytes:
            rows = encoded[block.layout.name].rows(block.first_row, block.layout.rows)
            by_unit.setdefault(block.unit, []).append((block.offset, rows))
    return by_unit


def encode_columns(
    columns: Mapping[str, Column], lengths: Sequence[int] | None, ragged: Collection[str]
) -> list[EncodedField]:
    """Encode padded columns; cut those in ``ragged`` to ``lengths``.

    Args:
        columns: columns that `dataplane_core.tensors.columns.check_columns` accepted.
        lengths: length of each row.
        ragged: names of the columns to cut.

    Raises:
        InvalidRequestError: (a ValueError) a column holds a value that cannot be stored.
    """
    encoded = []
    for name, column in columns.items():
        if isinstance(column, np.ndarray):
            encoded.append(_encode_objects(name, column.tolist()))
        elif name in ragged and lengths is not None:
            encoded.append(_encode_cut(name, column, lengths))
        else:
            encoded.append(_encode_tensor(name, column))
    return encoded


def _encode_cut(name: str, padded: torch.Tensor, lengths: Sequence[int]) -> EncodedField:
    item = tuple(padded.shape[2:])
    if 0 in item:
        return _encode_tensor(name, jagged_from_padded(padded, lengths))
    # Row i is the first lengths[i] values at i * stride; the padding is never copied.
    step = padded.element_size() * math.prod(item)
    stride = padded.shape[1] * step
    starts = range(0, len(lengths) * stride, stride) if stride else [0] * len(lengths)
    sizes = [length * step for length in lengths]
    slices = Slices(bytes_of(padded.detach().cpu()), starts, sizes)
    ends = np.cumsum(slices.sizes, dtype="<i8")
    return EncodedField(_ragged_layout(name, str(padded.dtype), item, ends), slices)


def encode(fields: TensorDictBase, count: int, *, allow_pickle: bool = False) -> list[EncodedField]:
    """Encode each of ``fields`` as one flat buffer.

    Args:
        fields: see `dataplane_core.tensors.rows.split_rows`.
        count: expected number of rows.
        allow_pickle: see `dataplane_core.tensors.object_codec.encode_object`. A value with text or
            integers that msgpack cannot encode is pickled as one value.

    Raises:
        InvalidRequestError: (a ValueError) as `checked_leaves`, or a value cannot be stored.
    """
    return [
        _encode_tensor(name, leaf)
        if isinstance(leaf, torch.Tensor)
        else _encode_objects(name, leaf, allow_pickle)
        for name, leaf in checked_leaves(fields, count).items()
    ]


def _encode_tensor(name: str, leaf: torch.Tensor) -> EncodedField:
    jagged = plain_jagged(leaf)
    if jagged is not None:
        return _encode_jagged(name, *jagged)
    tensor = leaf.detach()
    if tensor.is_nested:
        rows_together = tensor.layout == torch.strided and tensor.is_contiguous()
        flat = _raw(tensor.values()) if rows_together else None
        return _encode_rows(name, str(tensor.dtype), tensor.unbind(), flat)
    item = tuple(tensor.shape[1:])
    nbytes = tensor.element_size() * math.prod(item)
    layout = FieldLayout(name, str(tensor.dtype), False, item, b"", nbytes, count_rows(leaf))
    return _one_slice(layout, _raw(tensor))


def plain_jagged(leaf: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return values and offsets of a jagged tensor with contiguous rows; None for others."""
    nested: Any = leaf  # torch has no types for the methods of jagged tensors
    if not nested.is_nested or nested.layout != torch.jagged:
        return None
    if nested.lengths() is not None or nested._ragged_idx != 1:
        return None
    return nested.values().detach(), nested.offsets()


def _encode_jagged(name: str, values: torch.Tensor, offsets: torch.Tensor) -> EncodedField:
    bounds = offsets.cpu().to(torch.int64).numpy()
    item = tuple(values.shape[1:])
    step = values.element_size() * math.prod(item)
    # Offsets need not cover all values: a jagged tensor may be a part of another.
    first, last = int(bounds[0]), int(bounds[-1])
    if first or last != values.shape[0]:
        values = values[first:last]
    if step == 0:
        return _encode_rows(
            name, str(values.dtype), torch.split(values, (bounds[1:] - bounds[:-1]).tolist())
        )
    ends = (bounds[1:] - first).astype("<i8") * step
    return _one_slice(_ragged_layout(name, str(values.dtype), item, ends), _raw(values))


def _encode_rows(
    name: str, kind: str, rows: Sequence[torch.Tensor], flat: Bytes | None = None
) -> EncodedField:
    """Encode rows of any shapes: of strided nested tensors, or jagged ones with holes.

    ``flat`` is the rows' bytes if they are contiguous, which saves a copy.
    """
    buffers = [_raw(row) for row in rows]
    shapes = [tuple(row.shape) for row in rows]
    tail = shapes[0][1:] if shapes else ()
    alike = all(shape and shape[1:] == tail for shape in shapes) and math.prod(tail) > 0
    ends = np.cumsum([buffer.size for buffer in buffers], dtype="<i8")
    layout = _ragged_layout(name, kind, tail if alike else (), ends, None if alike else shapes)
    if flat is None or flat.size != layout.nbytes:
        flat = np.concatenate(buffers) if buffers else np.empty(0, np.uint8)
    return _one_slice(layout, flat)


def _one_slice(layout: FieldLayout, flat: Bytes) -> EncodedField:
    return EncodedField(layout, Slices(flat, [0], [flat.size]))


def _ragged_layout(
    name: str,
    kind: str,
    item: tuple[int, ...],
    ends: NDArray[np.int64],
    shapes: list[tuple[int, ...]] | None = None,
) -> FieldLayout:
    """Return a layout with ``ragged`` set, without ``ends`` if all rows have one size."""
    size = int(ends[0]) if ends.size else 0
    if (ends[1:] - ends[:-1] == size).all():
        return FieldLayout(name, kind, True, item, b"", size, ends.size, shapes)
    return FieldLayout(name, kind, True, item, ends.tobytes(), 0, ends.size, shapes)


def _raw(tensor: torch.Tensor) -> Bytes:
    """Return the tensor's bytes; a view if it is contiguous and in main memory."""
    return bytes_of(tensor.cpu().as_subclass(torch.Tensor))


def _encode_objects(name: str, values: Sequence[Any], allow_pickle: bool = False) -> EncodedField:
    what = f"field {name!r}"
    encoded = [_encode_object(what, value, allow_pickle) for value in values]
    ends = np.cumsum([len(data) for data in encoded], dtype="<i8")
    layout = _ragged_layout(name, OBJECT, (), ends)
    return _one_slice(layout, np.frombuffer(b"".join(encoded), np.uint8))


def _encode_object(what: str, value: Any, allow_pickle: bool) -> bytes:
    try:
        return encode_object(what, value, allow_pickle=allow_pickle)
    except InvalidTypeError as error:
        # Pickle would change other refused values, such as animated images.
        if allow_pickle and isinstance(error.__context__, OverflowError | UnicodeEncodeError):
            return encode_object(what, _Pickled(value), allow_pickle=True)
        raise


class _Pickled:
    """Wrapper that only pickle can encode; it is decoded as the value in it."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __reduce__(self) -> tuple[Any, ...]:
        return operator.getitem, ((self._value,), 0)
