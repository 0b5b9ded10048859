"""Python values of object columns as bytes, without pickle.

TransferQueue decodes object columns inside its storage units, which needs their classes there and
turns some types into others; bytes pass through untouched. The encoding is msgpack with two
extension types, for numpy arrays and torch tensors.
"""

from __future__ import annotations

import zlib
from typing import Any  # Any: values of object columns are the caller's own

import msgspec
import numpy as np
import torch

from dataplane_core import InvalidRequestError, UnavailableError

_ARRAY = 1
_TENSOR = 2


def _encode_unknown(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return msgspec.msgpack.Ext(_ARRAY, _packed(value.dtype.str, value.shape, value.tobytes()))
    if isinstance(value, torch.Tensor) and not value.is_nested:
        flat = value.detach().cpu().contiguous().flatten()
        raw = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        name = str(value.dtype).removeprefix("torch.")
        return msgspec.msgpack.Ext(_TENSOR, _packed(name, tuple(value.shape), raw))
    raise TypeError(
        f"{type(value).__name__} cannot be stored; use dict, list, str, bytes, numbers, bool, "
        "None, numpy arrays or tensors"
    )


def _packed(dtype: str, shape: tuple[int, ...], raw: bytes) -> bytes:
    return msgspec.msgpack.encode((dtype, shape, raw))


def _decode_extension(code: int, data: memoryview) -> Any:
    dtype, shape, raw = msgspec.msgpack.decode(data, type=tuple[str, list[int], bytes])
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


def encode_object(field: str, value: Any) -> bytes:
    """Encode one value of the object column ``field``.

    Tuples and sets come back as lists; dataclasses as dicts, enums as their values, and dates,
    decimals and UUIDs as strings, as msgspec writes them. Integers fit in 64 bits.

    Raises:
        InvalidRequestError: (a ValueError) naming the field and the type that cannot be stored.
    """
    try:
        return _encoder.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidRequestError(f"field {field!r}: {error}") from None


def seal(data: bytes) -> bytes:
    """``data`` with a checksum, for stores that may hand back other bytes than they were given."""
    return zlib.crc32(data).to_bytes(4, "little") + data


def unseal(field: str, data: Any) -> bytes:
    """The inverse of `seal`.

    Raises:
        UnavailableError: these are not the bytes that were stored.
    """
    if not isinstance(data, bytes) or zlib.crc32(data[4:]).to_bytes(4, "little") != data[:4]:
        raise UnavailableError(
            f"field {field!r}: the storage backend returned other bytes than were put"
        )
    return data[4:]


def decode_object(data: bytes) -> Any:
    """The inverse of `encode_object`."""
    return _decoder.decode(data)
