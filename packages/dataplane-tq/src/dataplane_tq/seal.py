"""A checksum around bytes, for stores that may hand back other bytes than they were given."""

from __future__ import annotations

import zlib
from typing import Any  # Any: what a store hands back

from dataplane_core import UnavailableError


def seal(data: bytes) -> bytes:
    """``data`` with its checksum."""
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
