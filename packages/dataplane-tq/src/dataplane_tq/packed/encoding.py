"""Fields of a put as flat buffers, and back.

The cost must be per byte, not per row: dense and jagged tensors are taken and given by views of
their storage and a handful of memcpys. Bytes are copied by numpy, because torch splits a copy over
threads, which on a busy machine wait for each other for longer than the copy takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any  # Any: a leaf of a TensorDict, a row of an object field

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDictBase,
    is_tensor_collection,
)

from dataplane_core import InvalidRequestError
from dataplane_core.rows import OBJECT
from dataplane_tq.object_codec import encode_object
from dataplane_tq.packed.catalogue import Block
from dataplane_tq.packed.layout import FieldLayout
from dataplane_tq.packed.slices import copy_slices

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class EncodedField:
    """One field of a put.

    Attributes:
        layout: of its rows.
        buffers: one after the other they are the field's flat buffer. They may share memory with
            the tensors they came from.
    """

    layout: FieldLayout
    buffers: list[Bytes]

    def cut(self, start: int, stop: int) -> list[Bytes]:
        """The bytes ``start`` to ``stop`` (exclusive) of the flat buffer, without copying."""
        parts = []
        for buffer in self.buffers:
            part = buffer[max(start, 0) : max(stop, 0)]
            if part.size:
                parts.append(part)
            start -= buffer.size
            stop -= buffer.size
        return parts


def writes(
    blocks: Iterable[Block], fields: Iterable[EncodedField]
) -> dict[str, list[tuple[int, Bytes]]]:
    """What to write where, per unit, so that ``blocks`` hold the rows of ``fields``."""
    encoded = {field.layout.name: field for field in fields}
    pieces: dict[str, list[tuple[int, Bytes]]] = {}
    for block in blocks:
        field = encoded[block.layout.name]
        nbytes = block.layout.nbytes
        start = field.layout.row_range(block.first_row)[0]
        offset = block.offset
        into = pieces.setdefault(block.unit, [])
        for part in field.cut(start, start + nbytes):
            into.append((offset, part))
            offset += part.size
    return pieces


def encode(fields: TensorDictBase, count: int) -> list[EncodedField]:
    """Take ``fields`` apart into one flat buffer each.

    Args:
        fields: as `dataplane_core.rows.split_rows` takes them.
        count: expected number of rows.

    Raises:
        InvalidRequestError: (a ValueError) if a leaf has another number of rows, is itself a
            TensorDict of tensors, or holds a value that cannot be stored.
    """
    if fields.batch_dims and fields.batch_size[0] != count:
        raise InvalidRequestError(
            f"fields: batch size {tuple(fields.batch_size)}; expected {count} rows, one per id"
        )
    lazy = isinstance(fields, LazyStackedTensorDict)
    encoded = []
    for name in fields.keys():  # noqa: SIM118  # iterating a TensorDict walks rows
        # get() would unwrap non-tensor leaves and lose whether they were per row.
        leaf = fields.get(name) if lazy else fields._get_str(name, None)
        if isinstance(leaf, torch.Tensor):
            encoded.append(_encode_tensor(name, leaf, count))
        else:
            encoded.append(_encode_objects(name, _object_rows(name, leaf, count)))
    return encoded


def _encode_tensor(name: str, leaf: torch.Tensor, count: int) -> EncodedField:
    tensor = leaf.detach()
    rows = _row_count(tensor)
    if rows != count:
        raise InvalidRequestError(f"field {name!r}: {rows} rows; expected {count}")
    if not tensor.is_nested:
        if tensor.layout != torch.strided:
            raise InvalidRequestError(
                f"field {name!r}: layout {tensor.layout}; expected a dense or nested tensor"
            )
        item = tuple(tensor.shape[1:])
        nbytes = tensor.element_size() * math.prod(item)
        layout = FieldLayout(name, str(tensor.dtype), False, item, b"", nbytes, count)
        return EncodedField(layout, [_raw(tensor)])
    nested: Any = tensor  # torch does not type what jagged tensors have besides
    if nested.layout == torch.jagged and nested.lengths() is None and nested._ragged_idx == 1:
        return _encode_jagged(name, nested.values(), nested.offsets())
    return _encode_rows(name, str(tensor.dtype), tensor.unbind())


def _row_count(tensor: torch.Tensor) -> int:
    if tensor.is_nested:
        return int(tensor.size(0))
    return tensor.shape[0] if tensor.dim() else 0


def _encode_jagged(name: str, values: torch.Tensor, offsets: torch.Tensor) -> EncodedField:
    bounds = offsets.cpu().to(torch.int64).numpy()
    item = tuple(values.shape[1:])
    step = values.element_size() * math.prod(item)
    if step == 0:
        return _encode_rows(
            name, str(values.dtype), torch.split(values, (bounds[1:] - bounds[:-1]).tolist())
        )
    # Offsets need not cover the values, as in a jagged tensor that is a part of another.
    first, last = int(bounds[0]), int(bounds[-1])
    ends = (bounds[1:] - first).astype("<i8") * step
    if first or last != values.shape[0]:
        values = values[first:last]
    return EncodedField(_ragged_layout(name, str(values.dtype), item, ends), [_raw(values)])


def _encode_rows(name: str, kind: str, rows: Sequence[torch.Tensor]) -> EncodedField:
    """Rows one by one: what is rare, such as strided nested tensors and jagged ones with holes."""
    buffers = [_raw(row) for row in rows]
    shapes = [tuple(row.shape) for row in rows]
    tail = shapes[0][1:] if shapes else ()
    alike = all(shape and shape[1:] == tail for shape in shapes) and math.prod(tail) > 0
    ends = np.cumsum([buffer.size for buffer in buffers], dtype="<i8")
    layout = _ragged_layout(name, kind, tail if alike else (), ends, None if alike else shapes)
    return EncodedField(layout, buffers)


def _ragged_layout(
    name: str,
    kind: str,
    item: tuple[int, ...],
    ends: NDArray[np.int64],
    shapes: list[tuple[int, ...]] | None = None,
) -> FieldLayout:
    """A layout without ``ends`` if all rows turn out to have one size."""
    size = int(ends[0]) if ends.size else 0
    if (ends[1:] - ends[:-1] == size).all():
        return FieldLayout(name, kind, True, item, b"", size, ends.size, shapes)
    return FieldLayout(name, kind, True, item, ends.tobytes(), 0, ends.size, shapes)


def _raw(tensor: torch.Tensor) -> Bytes:
    """The tensor's bytes; a view where it is contiguous and in main memory."""
    if not tensor.numel():
        return np.empty(0, np.uint8)
    plain = tensor.cpu().resolve_conj().resolve_neg().contiguous().as_subclass(torch.Tensor)
    # A contiguous tensor of one element may have any strides, which view() refuses.
    raw: Bytes = plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy()
    return raw


def _object_rows(name: str, leaf: Any, count: int) -> list[Any]:
    if isinstance(leaf, NonTensorStack):
        rows = leaf.tolist()
    elif isinstance(leaf, NonTensorData):
        data = leaf.data
        if not (isinstance(data, list | tuple) or (isinstance(data, np.ndarray) and data.ndim)):
            return [data] * count
        rows = list(data)
    elif is_tensor_collection(leaf):
        raise InvalidRequestError(
            f"field {name!r}: nested TensorDicts are not supported; put its leaves as own fields"
        )
    else:
        rows = list(leaf)
    if len(rows) != count:
        raise InvalidRequestError(f"field {name!r}: {len(rows)} rows; expected {count}")
    return rows


def _encode_objects(name: str, values: Sequence[Any]) -> EncodedField:
    encoded = [encode_object(name, value) for value in values]
    ends = np.cumsum([len(data) for data in encoded], dtype="<i8")
    layout = _ragged_layout(name, OBJECT, (), ends)
    return EncodedField(layout, [np.frombuffer(b"".join(encoded), np.uint8)] if encoded else [])


def pack_padded(tensor: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of a padded tensor one after the other, without their padding.

    Args:
        tensor: ``(N, T, *)``, any dtype.
        lengths: ``(N,)`` integers, how many of a row's ``T`` are data.

    Returns:
        ``values`` of shape ``(sum of lengths, *)`` and ``offsets`` of shape ``(N + 1,)``, int64, as
        `torch.nested.nested_tensor_from_jagged` takes them.

    Raises:
        InvalidRequestError: (a ValueError) if lengths do not fit the tensor.
    """
    count, width = tensor.shape[:2]
    kept = lengths.detach().cpu().to(torch.int64).numpy()
    if kept.shape != (count,) or (kept < 0).any() or (kept > width).any():
        raise InvalidRequestError(
            f"lengths {tuple(lengths.shape)} for a tensor {tuple(tensor.shape)}; expected {count} "
            f"of 0 to {width}"
        )
    offsets = np.zeros(count + 1, np.int64)
    np.cumsum(kept, out=offsets[1:])
    step = tensor.element_size() * math.prod(tensor.shape[2:])
    rows = range(0, count * width * step, width * step) if width * step else [0] * count
    values = _empty(int(offsets[-1]) * step)
    begins = (offsets[:-1] * step).tolist()
    copy_slices(values, begins, _raw(tensor.detach()), rows, (kept * step).tolist())
    return (
        _tensor(values, tensor.dtype, (int(offsets[-1]), *tensor.shape[2:])),
        torch.from_numpy(offsets),
    )


def unpack_padded(
    values: torch.Tensor, offsets: torch.Tensor, width: int, pad_value: float
) -> torch.Tensor:
    """The inverse of `pack_padded`.

    Args:
        values: ``(V, *)``, any dtype.
        offsets: ``(N + 1,)`` integers, ascending.
        width: ``T`` of the result, at least the longest row.
        pad_value: what follows the data of each row.

    Returns:
        Tensor of shape ``(N, T, *)``.

    Raises:
        InvalidRequestError: (a ValueError) if a row is longer than ``width`` or offsets do not fit
            the values.
    """
    bounds = offsets.detach().cpu().to(torch.int64).numpy()
    kept = bounds[1:] - bounds[:-1]
    if bounds.ndim != 1 or not bounds.size:
        raise InvalidRequestError(f"offsets {tuple(offsets.shape)}; expected (N + 1,)")
    if bounds[0] < 0 or bounds[-1] > values.shape[0] or (kept < 0).any():
        raise InvalidRequestError(
            f"offsets {bounds[0]}..{bounds[-1]} for {values.shape[0]} values; expected ascending "
            "offsets within them"
        )
    if (kept > width).any():
        raise InvalidRequestError(f"a row of {kept.max()} values; expected at most {width}")
    item = tuple(values.shape[1:])
    step = values.element_size() * math.prod(item)
    pad = _raw(torch.full((1,), pad_value, dtype=values.dtype))
    padded = np.zeros(kept.size * width * step, np.uint8)
    if pad.any():
        lane = f"u{min(pad.size, 8)}"  # as integers, or as pairs of them for complex128
        padded.view(lane).reshape(-1, len(pad.view(lane)))[:] = pad.view(lane)
    rows = range(0, padded.size, width * step) if width * step else [0] * kept.size
    starts = (bounds[:-1] * step).tolist()
    copy_slices(padded, rows, _raw(values.detach()), starts, (kept * step).tolist())
    return _tensor(padded, values.dtype, (kept.size, width, *item))


def _empty(nbytes: int) -> Bytes:
    # numpy asks for huge pages, which makes fresh memory faster to fill than torch's.
    return np.empty(nbytes, np.uint8)


def _tensor(raw: Bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor on the memory of ``raw``."""
    if not raw.size:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(raw).view(dtype).view(shape)
