"""Encoding of Python values of object columns, without pickle.

The format is msgpack with two extension types, for numpy arrays and torch tensors. All clients use
it, so that all accept and return the same values. Public to authors of adapters.
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar  # Any: values of object columns are the caller's own

import msgspec
import numpy as np
import torch

from dataplane_core.errors import InvalidTypeError
from dataplane_core.tensors.columns import bytes_of
from dataplane_core.tensors.rows import storable_tensor

_T = TypeVar("_T")

_ARRAY = 1
_TENSOR = 2


def _encode_unknown(value: Any) -> Any:
    if isinstance(value, np.generic) and value.dtype.kind != "V":
        plain = value.item()
        if not isinstance(plain, np.generic):
            return plain
    if type(value) in (np.ndarray, np.memmap) and _is_plain(value.dtype):
        return msgspec.msgpack.Ext(_ARRAY, _packed(value.dtype.str, value.shape, value.tobytes()))
    if isinstance(value, torch.Tensor) and not value.is_nested:
        raw = bytes_of(storable_tensor("a value", value)).tobytes()
        name = str(value.dtype).removeprefix("torch.")
        return msgspec.msgpack.Ext(_TENSOR, _packed(name, tuple(value.shape), raw))
    name = type(value).__name__
    if isinstance(value, np.ndarray | np.generic):
        name += f" of dtype {value.dtype}"
    raise TypeError(
        f"{name} cannot be stored; use dict, list, str, bytes, numbers, bool, None, numpy arrays "
        "or tensors"
    )


def _is_plain(dtype: np.dtype[Any]) -> bool:
    """Return whether ``dtype.str`` identifies the dtype; false for objects, records, extensions."""
    return not dtype.hasobject and dtype.kind != "V" and np.dtype(dtype.str) == dtype


def _packed(dtype: str, shape: tuple[int, ...], raw: bytes) -> bytes:
    return msgspec.msgpack.encode((dtype, shape, raw))


def _decode_extension(code: int, data: memoryview) -> Any:
    dtype, shape, raw = _packed_decoder.decode(data)
    if code == _ARRAY:
        return np.frombuffer(raw, dtype=np.dtype(dtype)).reshape(shape).copy()
    if code == _TENSOR:
        torch_dtype = getattr(torch, dtype, None)
        if not isinstance(torch_dtype, torch.dtype):
            raise ValueError(f"stored tensor has dtype {dtype!r}, which torch does not have")
        if not raw:
            return torch.empty(shape, dtype=torch_dtype)
        return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(torch_dtype).reshape(shape)
    raise ValueError(f"stored value has extension type {code}; expected {_ARRAY} or {_TENSOR}")


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_unknown)
_decoder = msgspec.msgpack.Decoder(ext_hook=_decode_extension)
_packed_decoder = msgspec.msgpack.Decoder(tuple[str, list[int], bytes])
_struct_decoders: dict[type, msgspec.msgpack.Decoder[Any]] = {}
_making_decoders = threading.Lock()


def encode_object(what: str, value: Any) -> bytes:
    """Encode one value; ``what`` names it in the error, for example ``field 'content'``.

    Tuples and sets decode as lists, dataclasses as dicts, enums as their values, and dates,
    decimals and UUIDs as strings, as msgspec encodes them. Integers must fit in 64 bits. numpy
    arrays need one of numpy's plain dtypes. Masked arrays, other subclasses, and arrays of objects,
    records or another library's dtypes are refused, because they would decode as something else.

    Raises:
        InvalidTypeError: (a ValueError and a TypeError) names ``what`` and the type that cannot be
            stored.
    """
    try:
        return _encoder.encode(value)
    except Exception as error:  # noqa: BLE001  # a value's own code can raise anything
        raise InvalidTypeError(f"{what}: {error}") from None


def decode_object(data: bytes) -> Any:
    """Decode a value of `encode_object`; raise ValueError if ``data`` is something else."""
    return _decoder.decode(data)


def decode_struct(data: bytes, struct: type[_T]) -> _T:
    """Decode a msgspec struct of `encode_object`; raise ValueError if ``data`` is another."""
    decoder = _struct_decoders.get(struct)
    if decoder is None:
        # msgspec crashes if two threads use a type for the first time at once.
        with _making_decoders:
            decoder = msgspec.msgpack.Decoder(struct, ext_hook=_decode_extension)
            _struct_decoders[struct] = decoder
    decoded: _T = decoder.decode(data)
    return decoded
