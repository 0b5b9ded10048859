"""Encoding of an event's sample keys: eight bytes each, little-endian, in reported order."""

from __future__ import annotations

import struct
from collections.abc import Sequence


def pack_keys(keys: Sequence[int]) -> bytes:
    """Encode sample keys for `EventModel.keys`."""
    return struct.pack(f"<{len(keys)}q", *keys)


def unpack_keys(packed: bytes) -> tuple[int, ...]:
    """Decode what `pack_keys` returned."""
    return struct.unpack(f"<{len(packed) // 8}q", packed)
