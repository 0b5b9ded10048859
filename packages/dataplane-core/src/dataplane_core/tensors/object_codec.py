"""Encoding of Python values of object columns, without pickle.

The format is msgpack with extension types: numpy arrays, tensors, nested tensors, integers of any
size, text that UTF-8 cannot hold, and the types of `dataplane_core.tensors.object_types`. All
clients use it, so that all accept and return the same values. Public to authors of adapters.

A caller can allow pickle as a fallback, to encode and to decode. Decoding a pickle runs code of
whoever wrote it.
"""

from __future__ import annotations

import pickle
import threading
from dataclasses import fields, is_dataclass
from enum import Enum
from itertools import chain
from typing import Any, TypeVar  # Any: values of object columns are the caller's own

import msgspec
import numpy as np
import torch

from dataplane_core.errors import InvalidTypeError
from dataplane_core.tensors.columns import bytes_of
from dataplane_core.tensors.object_types import type_named, type_of
from dataplane_core.tensors.rows import dtype_named, storable_tensor

_T = TypeVar("_T")

_ARRAY = 1
_TENSOR = 2
_NESTED = 3
_INTEGER = 4
_TYPE = 5
_PICKLE = 6
_TEXT = 7


class _Extension:
    """msgpack extension that, unlike msgspec's, can be a key of a dict."""

    def __init__(self, code: int, data: bytes) -> None:
        self.code = code
        self.data = data


_MAX_DEPTH = 500
"""Maximum nesting; how deep msgspec reads and writes depends on Python's version and the stack."""
_CONTAINERS = (dict, list, tuple, set, frozenset)
_LEAVES = frozenset({str, bytes, int, float, bool, type(None)})


def _encode_unknown(value: Any) -> Any:
    if type(value) is _Extension:
        return msgspec.msgpack.Ext(value.code, value.data)
    # Dates of numpy would become integers or texts, depending on their unit.
    if isinstance(value, np.generic) and value.dtype.kind not in "VMm":
        plain = value.item()
        if not isinstance(plain, np.generic):
            return plain
    if type(value) in (np.ndarray, np.memmap) and _is_plain(value.dtype):
        return msgspec.msgpack.Ext(_ARRAY, _packed(value.dtype.str, value.shape, value.tobytes()))
    if isinstance(value, torch.Tensor) and not value.is_nested:
        raw = bytes_of(storable_tensor("a value", value)).tobytes()
        name = str(value.dtype).removeprefix("torch.")
        return msgspec.msgpack.Ext(_TENSOR, _packed(name, tuple(value.shape), raw))
    if isinstance(value, torch.Tensor):
        return msgspec.msgpack.Ext(_NESTED, _encode(_nested_parts(value)))
    registered = type_of(value)
    if registered is not None:
        stored = (registered.name, registered.encode(value))
        return msgspec.msgpack.Ext(_TYPE, _encode(stored))
    name = type(value).__name__
    if isinstance(value, np.ndarray | np.generic):
        name += f" of dtype {value.dtype}"
    raise TypeError(
        f"{name} cannot be stored; use dict, list, str, bytes, numbers, bool, None, numpy arrays, "
        "tensors, or register_object_type"
    )


def _nested_parts(value: torch.Tensor) -> tuple[str, int, list[torch.Tensor]]:
    rows = list(value.unbind())
    if not rows:
        raise TypeError("nested tensor without rows cannot be stored")
    if value.layout == torch.strided:
        return "strided", 0, rows
    # Store the ragged dimension: rows of equal length do not show which one it is.
    return "jagged", value._ragged_idx - 1, rows  # type: ignore[attr-defined]


def _nested_tensor(layout: str, ragged: int, rows: list[torch.Tensor]) -> torch.Tensor:
    if layout == "strided":
        return torch.nested.as_nested_tensor(rows)
    if layout != "jagged":
        raise ValueError(f"stored nested tensor has layout {layout!r}")
    offsets = torch.tensor([0, *(row.shape[ragged] for row in rows)]).cumsum(0)
    values = torch.cat(rows, ragged)
    return torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=ragged + 1)


def _encode_pickled(value: Any) -> Any:
    try:
        return _encode_unknown(value)
    except TypeError:
        return msgspec.msgpack.Ext(_PICKLE, pickle.dumps(value))


def _encode(value: Any, encoder: msgspec.msgpack.Encoder | None = None) -> bytes:
    encoder = encoder or _encoder
    try:
        return encoder.encode(value)
    except (OverflowError, UnicodeEncodeError):
        pass
    try:
        return encoder.encode(_encodable(value))
    except (OverflowError, UnicodeEncodeError) as error:
        if encoder is _pickling_encoder:
            return encoder.encode(msgspec.msgpack.Ext(_PICKLE, pickle.dumps(value)))
        raise TypeError(
            f"{error}; such a value cannot be stored inside a msgspec.Struct, an attrs object or a "
            "subclass of str; use a dict or a dataclass"
        ) from None


def _encodable(value: Any) -> Any:
    """Replace integers of more than 64 bits, and text with a lone surrogate, with extensions.

    This includes values inside enums, dicts, lists, tuples, sets and dataclasses. `_encode` refuses
    such values in other objects that msgspec encodes.
    """
    if isinstance(value, Enum):
        return _encodable(value.value)
    if isinstance(value, np.str_):
        value = value.item()
    if type(value) is str:
        try:
            value.encode()
        except UnicodeEncodeError:
            return _Extension(_TEXT, value.encode(errors="surrogatepass"))
    if type(value) is int and not -(2**63) <= value < 2**64:
        size = value.bit_length() // 8 + 1
        return _Extension(_INTEGER, value.to_bytes(size, "little", signed=True))
    if isinstance(value, dict):
        return {_encodable(key): _encodable(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return tuple(map(_encodable, value))  # a key must be hashable
    if is_dataclass(value) and not isinstance(value, type):
        names = [each.name for each in fields(value) if hasattr(value, each.name)]
        return {name: _encodable(getattr(value, name)) for name in names}
    return value


def _check_depth(value: Any) -> None:
    """Raise a TypeError if containers are nested deeper than `_MAX_DEPTH`."""
    level = [value] if isinstance(value, _CONTAINERS) else []
    for _ in range(_MAX_DEPTH):
        inner: list[Any] = []
        for each in level:
            items = list(chain(each, each.values())) if isinstance(each, dict) else each
            if not _LEAVES.issuperset(map(type, items)):
                inner += [item for item in items if isinstance(item, _CONTAINERS)]
        if not inner:
            return
        level = inner
    raise TypeError(f"a value with more than {_MAX_DEPTH} nested levels cannot be stored")


def _is_plain(dtype: np.dtype[Any]) -> bool:
    """Return whether ``dtype.str`` identifies the dtype; false for objects, records, extensions."""
    return not dtype.hasobject and dtype.kind != "V" and np.dtype(dtype.str) == dtype


def _packed(dtype: str, shape: tuple[int, ...], raw: bytes) -> bytes:
    return msgspec.msgpack.encode((dtype, shape, raw))


def _decode_extension(code: int, data: memoryview) -> Any:
    if code == _INTEGER:
        return int.from_bytes(data, "little", signed=True)
    if code == _TEXT:
        return bytes(data).decode(errors="surrogatepass")
    if code == _NESTED:
        return _nested_tensor(*_decoder.decode(data))
    if code == _TYPE:
        name, stored = _decoder.decode(data)
        registered = type_named(name)
        try:
            return registered.decode(stored)
        except Exception as error:  # the type's own code can raise anything
            raise ValueError(f"stored value of type {name!r} cannot be read: {error}") from error
    if code == _PICKLE:
        raise ValueError(
            "stored value is a pickle, and reading it would run code of whoever wrote it; set "
            "allow_pickle only if you trust every process that can write to this store"
        )
    if code not in (_ARRAY, _TENSOR):
        raise ValueError(f"stored value has the unknown extension type {code}")
    dtype, shape, raw = _packed_decoder.decode(data)
    if code == _ARRAY:
        return np.frombuffer(raw, dtype=np.dtype(dtype)).reshape(shape).copy()
    torch_dtype = dtype_named(dtype)
    if not raw:
        return torch.empty(shape, dtype=torch_dtype)
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(torch_dtype).reshape(shape)


def _decode_pickled(code: int, data: memoryview) -> Any:
    return pickle.loads(data) if code == _PICKLE else _decode_extension(code, data)  # noqa: S301


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_unknown)
_decoder = msgspec.msgpack.Decoder(ext_hook=_decode_extension)
_pickling_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_pickled)
_pickling_decoder = msgspec.msgpack.Decoder(ext_hook=_decode_pickled)
_packed_decoder = msgspec.msgpack.Decoder(tuple[str, list[int], bytes])
_struct_decoders: dict[type, msgspec.msgpack.Decoder[Any]] = {}
_making_decoders = threading.Lock()


def encode_object(what: str, value: Any, *, allow_pickle: bool = False) -> bytes:
    """Encode one value; ``what`` names it in the error, for example ``field 'content'``.

    Tuples and sets decode as lists, dataclasses as dicts, enums as their values, and dates,
    decimals and UUIDs as strings, as msgspec encodes them. So an enum and its value as two keys of
    a dict become one. A datetime with a time zone decodes as a datetime in UTC, one without as a
    string. Objects of msgspec.Struct and attrs decode as dicts;
    they cannot hold integers of more than 64 bits or text with a lone surrogate. Tensors decode on
    the CPU, without a gradient. numpy arrays need one of numpy's plain dtypes. Masked arrays, other
    subclasses, and arrays of objects, records or another library's dtypes are refused, because they
    would decode as something else. Images of Pillow, models of pydantic, and ``BatchFeature`` and
    ``BatchEncoding`` of transformers are stored; add other types with
    `dataplane_core.tensors.object_types.register_object_type`. Containers nest up to 500 levels.

    Args:
        what: name for the error.
        value: the value.
        allow_pickle: pickle a value that cannot be stored otherwise; every reader must allow it.

    Raises:
        InvalidTypeError: (a ValueError and a TypeError) the value cannot be stored; the error names
            ``what`` and the type.
    """
    try:
        encoded = _encode(value, _pickling_encoder if allow_pickle else _encoder)
        if len(encoded) > _MAX_DEPTH:  # each level takes at least one byte
            _check_depth(value)
        return encoded
    except Exception as error:  # noqa: BLE001  # a value's own code can raise anything
        raise InvalidTypeError(f"{what}: {error}") from None


def decode_object(data: bytes, *, allow_pickle: bool = False) -> Any:
    """Decode a value that `encode_object` encoded.

    Args:
        data: the encoded value.
        allow_pickle: decode pickles, which runs code of whoever wrote ``data``.

    Raises:
        ValueError: ``data`` is not an encoded value, is nested too deeply, or is a pickle that is
            not allowed.
    """
    try:
        return (_pickling_decoder if allow_pickle else _decoder).decode(data)
    except RecursionError as error:
        raise ValueError(f"stored value is nested too deeply to be read: {error}") from None


def decode_struct(data: bytes, struct: type[_T]) -> _T:
    """Decode an encoded msgspec struct; raise ValueError if ``data`` is not a ``struct``."""
    decoder = _struct_decoders.get(struct)
    if decoder is None:
        # msgspec crashes if two threads use a type for the first time at once.
        with _making_decoders:
            decoder = msgspec.msgpack.Decoder(struct, ext_hook=_decode_extension)
            _struct_decoders[struct] = decoder
    decoded: _T = decoder.decode(data)
    return decoded
