"""Decodes rows of one field, from the flat buffers of one or several blocks, into one tensor.

The result has the form that `collate_rows` defines. It owns its memory: blocks may be freed and
reused as soon as `decode` returns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any  # Any: a row of an object field

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import NonTensorStack

from dataplane_core import InvalidRequestError, pages
from dataplane_core.pages import copy_slices
from dataplane_core.tensors.columns import (
    Column,
    Padded,
    object_array,
    object_leaf,
    padded_tensor,
    tensor_on,
)
from dataplane_core.tensors.object_codec import decode_object
from dataplane_core.tensors.rows import OBJECT, collate_rows
from dataplane_tq.packed.layout import FieldLayout, Indices

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of one block, and their positions in the answer, the tensor that `decode` returns.

    Attributes:
        layout: layout of the rows in ``flat``.
        flat: the flat buffer of ``layout``.
        rows: requested rows of ``layout``, in this order; None for all in their order.
        positions: each row's position in the answer; None if the rows follow those of the previous
            piece.
        owned: whether the answer may take over ``flat``, because nothing else uses it.
    """

    layout: FieldLayout
    flat: Bytes
    rows: Indices | None = None
    positions: Indices | None = None
    owned: bool = False

    @property
    def count(self) -> int:
        """Number of rows of the answer that come from the piece."""
        return self.layout.rows if self.rows is None else len(self.rows)


def decode(pieces: Sequence[Piece], *, allow_pickle: bool = False) -> torch.Tensor | NonTensorStack:
    """Decode the rows of ``pieces`` as one field.

    Args:
        pieces: pieces of one kind with at least one row in total. If they have positions, these
            name every row of the answer once.
        allow_pickle: see `dataplane_core.tensors.object_codec.decode_object`.

    Returns:
        A dense tensor ``(n, *shape)`` for rows of one shape; a jagged tensor for rows that differ
        in their first dimension; a strided nested tensor for other tensors; a NonTensorStack for
        objects.

    Raises:
        InvalidRequestError: (a ValueError) the pieces are of several kinds, lack bytes, or do not
            fill every row of the answer.
    """
    pieces, places = _checked(pieces)
    layout = pieces[0].layout
    if layout.kind == OBJECT:
        leaf: Any = object_leaf(_decode_objects(pieces, places, allow_pickle))
        return leaf  # a stack, because there is at least one row
    return _decode_tensor(pieces, places)


def _decode_tensor(pieces: Sequence[Piece], places: Sequence[slice | Indices]) -> torch.Tensor:
    layout = pieces[0].layout
    if all(_same_item(piece.layout, layout) for piece in pieces):
        return _decode_uniform(pieces, places)
    if all(_has_tail(piece.layout, _tail(layout)) for piece in pieces):
        return _decode_ragged(pieces, places)
    return _decode_rows(pieces, places)


def decode_column(pieces: Sequence[Piece], pad_value: float, width: int | None) -> Column:
    """Decode the rows of ``pieces`` as one column, padded as by `padded_tensor`.

    Args:
        pieces: see `decode`.
        pad_value: value that fills shorter rows.
        width: minimum size of dim 1, for tensors of two or more dims; None disables padding.

    Returns:
        A tensor, or an object array of Python values.

    Raises:
        InvalidRequestError: (a ValueError) as `decode`.
    """
    pieces, places = _checked(pieces)
    layout = pieces[0].layout
    if layout.kind == OBJECT:
        return object_array(_decode_objects(pieces, places))
    uniform = all(_same_item(piece.layout, layout) for piece in pieces)
    padded = width is not None and not uniform
    if padded and all(_has_tail(piece.layout, _tail(layout)) for piece in pieces):
        return _decode_padded(pieces, places, pad_value, width or 0)
    return padded_tensor(_decode_tensor(pieces, places), pad_value, width)


def _checked(pieces: Sequence[Piece]) -> tuple[Sequence[Piece], list[slice | Indices]]:
    """Check pieces; return those that have rows, and their places in the answer."""
    pieces = [piece for piece in pieces if piece.count]
    if not pieces:
        raise InvalidRequestError("decode: no rows")
    first = pieces[0].layout
    for piece in pieces:
        layout = piece.layout
        if layout.kind != first.kind:
            raise InvalidRequestError(
                f"field {first.name!r}: rows of {first.kind} and of {layout.kind} in one answer"
            )
        if piece.flat.size != layout.nbytes:
            raise InvalidRequestError(
                f"field {layout.name!r}: {piece.flat.size} bytes for {layout.rows} rows; expected "
                f"{layout.nbytes}"
            )
    return pieces, _places(pieces)


def _places(pieces: Sequence[Piece]) -> list[slice | Indices]:
    """Return the answer's rows for each piece; a slice if they are consecutive."""
    total = sum(piece.count for piece in pieces)
    places: list[slice | Indices] = []
    at = 0
    for piece in pieces:
        place: slice | Indices = slice(at, at + piece.count)
        if piece.positions is not None:
            if len(piece.positions) != piece.count:
                raise InvalidRequestError(
                    f"field {piece.layout.name!r}: {len(piece.positions)} positions for "
                    f"{piece.count} rows"
                )
            place = _as_slice(piece.positions) or piece.positions
        places.append(place)
        at += piece.count
    if any(piece.positions is not None for piece in pieces):
        filled = np.zeros(total, np.bool_)
        for place in places:
            ends = (place.start, place.stop - 1) if isinstance(place, slice) else place
            if np.min(ends) < 0 or np.max(ends) >= total:
                raise InvalidRequestError(f"decode: a position outside the answer's {total} rows")
            filled[place] = True
        if not filled.all():
            raise InvalidRequestError(
                f"decode: the positions do not cover all of the answer's {total} rows"
            )
    return places


def _as_slice(rows: Indices) -> slice | None:
    """Return ``rows`` as a slice if they are consecutive; else None."""
    first = int(rows[0])
    if int(rows[-1]) - first + 1 != len(rows) or (rows[1:] - rows[:-1] != 1).any():
        return None
    return slice(first, first + len(rows))


def _dtype(layout: FieldLayout) -> torch.dtype:
    dtype = getattr(torch, layout.kind.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise InvalidRequestError(f"field {layout.name!r}: torch has no dtype {layout.kind!r}")
    return dtype


def _same_item(layout: FieldLayout, other: FieldLayout) -> bool:
    """Return whether all rows of both layouts have one shape."""
    return (
        not layout.ends
        and layout.shapes is None
        and layout.ragged == other.ragged
        and layout.item == other.item
        and layout.row_nbytes == other.row_nbytes
    )


def _tail(layout: FieldLayout) -> tuple[int, ...]:
    """Return the shape of a row without its first dimension."""
    return layout.item if layout.ragged else layout.item[1:]


def _has_tail(layout: FieldLayout, tail: tuple[int, ...]) -> bool:
    """Return whether every row has the shape (any length, *tail), with no 0 in ``tail``."""
    return (
        layout.shapes is None
        and (layout.ragged or bool(layout.item))
        and _tail(layout) == tail
        and math.prod(tail) > 0
    )


def _shape(layout: FieldLayout, dtype: torch.dtype, row: int, nbytes: int) -> tuple[int, ...]:
    """Return the shape of a row of ``nbytes``."""
    if layout.shapes is not None:
        return layout.shapes[row]
    if not layout.ragged:
        return layout.item
    return (nbytes // (dtype.itemsize * math.prod(layout.item)), *layout.item)


def _decode_uniform(pieces: Sequence[Piece], places: Sequence[slice | Indices]) -> torch.Tensor:
    """Decode rows of one shape into a dense tensor."""
    layout = pieces[0].layout
    dtype = _dtype(layout)
    total = sum(piece.count for piece in pieces)
    size = layout.row_nbytes
    shape = (total, *_shape(layout, dtype, 0, size))
    if size == 0:
        return torch.empty(shape, dtype=dtype)  # rows without elements: nothing to copy
    if _can_become_answer(pieces, places):
        return tensor_on(pieces[0].flat, dtype, shape)
    data = pages.empty(total * size)
    # Copy in the widest integers that divide a row: more bytes at a time.
    lane = next(f"u{width}" for width in (8, 4, 2, 1) if size % width == 0)
    into = data.view(lane).reshape(total, -1)
    for piece, place in zip(pieces, places, strict=True):
        if piece.rows is None and isinstance(place, slice):
            data[place.start * size : place.stop * size] = piece.flat
            continue
        flat = piece.flat.view(lane).reshape(piece.layout.rows, -1)
        if piece.rows is None:
            into[place] = flat
            continue
        # Raises an IndexError if a row is out of range.
        piece.layout.row_ranges(piece.rows[[piece.rows.argmin(), piece.rows.argmax()]])
        run = _as_slice(piece.rows)
        if run is not None:
            into[place] = flat[run]
        elif isinstance(place, slice):
            # mode="clip" lets numpy write into `out` directly; the range was checked above.
            np.take(flat, piece.rows, axis=0, out=into[place], mode="clip")
        else:
            into[place] = flat[piece.rows]
    return tensor_on(data, dtype, shape)


def _decode_ragged(pieces: Sequence[Piece], places: Sequence[slice | Indices]) -> torch.Tensor:
    """Decode rows that differ at most in their first dimension."""
    spans, sizes = _spans(pieces, places)
    ends = np.cumsum(sizes)
    begins = ends - sizes
    complete = _can_become_answer(pieces, places)
    data = pieces[0].flat if complete else pages.empty(int(ends[-1]))
    for piece, place, (starts, stops) in zip(pieces, places, spans, strict=True):
        if complete:
            break
        if piece.rows is None and isinstance(place, slice):
            data[begins[place.start] : ends[place.stop - 1]] = piece.flat
        else:
            _copy_rows(data, begins[place], piece.flat, starts, stops)
    dtype, tail = _dtype(pieces[0].layout), _tail(pieces[0].layout)
    step = dtype.itemsize * math.prod(tail)
    shortest, longest = int(sizes.min()) // step, int(sizes.max()) // step
    values = tensor_on(data, dtype, (len(data) // step, *tail))
    if shortest == longest:
        return values.view(len(sizes), longest, *tail)
    offsets = np.zeros(len(sizes) + 1, np.int64)
    np.floor_divide(ends, step, out=offsets[1:])
    return torch.nested.nested_tensor_from_jagged(
        values, torch.from_numpy(offsets), min_seqlen=shortest, max_seqlen=longest
    )


def _can_become_answer(pieces: Sequence[Piece], places: Sequence[slice | Indices]) -> bool:
    """Return True if the only piece can become the answer without a copy."""
    [first, *others] = pieces
    return not others and first.owned and first.rows is None and isinstance(places[0], slice)


def padded_of(layout: FieldLayout, pad_value: float, width: int) -> Padded | None:
    """Return the padded tensor of `decode_column`, before the rows are copied into it.

    It is None for Python values, for rows of one size, and for rows that cannot be padded.

    Args:
        layout: layout of all rows of the answer.
        pad_value: see `decode_column`.
        width: see `decode_column`.
    """
    if layout.kind == OBJECT or not layout.ends or not _has_tail(layout, _tail(layout)):
        return None
    starts, stops = layout.row_ranges()
    dtype, tail = _dtype(layout), _tail(layout)
    width = max(width, int((stops - starts).max()) // (dtype.itemsize * math.prod(tail)))
    return Padded(stops - starts, tail, dtype, width, pad_value) if width else None


def _decode_padded(
    pieces: Sequence[Piece],
    places: Sequence[slice | Indices],
    pad_value: float,
    width: int,
) -> torch.Tensor:
    """Decode rows that differ at most in their first dimension, and pad them there."""
    spans, sizes = _spans(pieces, places)
    dtype, tail = _dtype(pieces[0].layout), _tail(pieces[0].layout)
    width = max(width, int(sizes.max()) // (dtype.itemsize * math.prod(tail)))
    if not width:
        return torch.empty((len(sizes), 0, *tail), dtype=dtype)
    padded = Padded(sizes, tail, dtype, width, pad_value)
    for piece, place, (starts, stops) in zip(pieces, places, spans, strict=True):
        begins = [padded.begins[at] for at in _numbers(place)]
        copy_slices(padded.raw, begins, piece.flat, starts.tolist(), (stops - starts).tolist())
    return padded.tensor


def _spans(
    pieces: Sequence[Piece], places: Sequence[slice | Indices]
) -> tuple[list[tuple[Indices, Indices]], Indices]:
    """Return the starts and stops of each piece's rows, and the sizes of the answer's rows."""
    spans = [piece.layout.row_ranges(piece.rows) for piece in pieces]
    sizes = np.empty(sum(piece.count for piece in pieces), np.int64)
    for place, (starts, stops) in zip(places, spans, strict=True):
        sizes[place] = stops - starts
    return spans, sizes


def _copy_rows(into: Bytes, begins: Indices, flat: Bytes, starts: Indices, stops: Indices) -> None:
    """Copy rows to ``begins`` in ``into``; rows that are adjacent in both take one copy."""
    after = begins[:-1] + (stops[:-1] - starts[:-1])
    breaks = np.flatnonzero((starts[1:] != stops[:-1]) | (begins[1:] != after))
    firsts = np.concatenate(([0], breaks + 1))
    lasts = np.concatenate((breaks, [len(starts) - 1]))
    sizes = stops[lasts] - starts[firsts]
    copy_slices(into, begins[firsts].tolist(), flat, starts[firsts].tolist(), sizes.tolist())


def _decode_rows(pieces: Sequence[Piece], places: Sequence[slice | Indices]) -> torch.Tensor:
    """Decode rows of any shapes."""
    dtype = _dtype(pieces[0].layout)
    rows: list[Any] = [None] * sum(piece.count for piece in pieces)
    for piece, place in zip(pieces, places, strict=True):
        layout = piece.layout
        for at, row in zip(_numbers(place), _row_numbers(piece), strict=True):
            start, stop = layout.row_range(row)
            shape = _shape(layout, dtype, row, stop - start)
            rows[at] = tensor_on(piece.flat[start:stop].copy(), dtype, shape)
    tensor = collate_rows(str(dtype), rows)
    assert isinstance(tensor, torch.Tensor)
    return tensor


def _decode_objects(
    pieces: Sequence[Piece], places: Sequence[slice | Indices], allow_pickle: bool = False
) -> list[Any]:
    values: list[Any] = [None] * sum(piece.count for piece in pieces)
    for piece, place in zip(pieces, places, strict=True):
        view = piece.flat.data
        starts, stops = piece.layout.row_ranges(piece.rows)
        decoded = [
            decode_object(bytes(view[start:stop]), allow_pickle=allow_pickle)
            for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)
        ]
        if isinstance(place, slice):
            values[place] = decoded
        else:
            for at, value in zip(place.tolist(), decoded, strict=True):
                values[at] = value
    return values


def _numbers(place: slice | Indices) -> Sequence[int]:
    return range(place.start, place.stop) if isinstance(place, slice) else place.tolist()


def _row_numbers(piece: Piece) -> Sequence[int]:
    return range(piece.layout.rows) if piece.rows is None else piece.rows.tolist()
