"""Keys of samples as an event holds them: eight bytes each, little-endian, in the order told."""

from __future__ import annotations

import struct
from collections.abc import Sequence


def pack_keys(keys: Sequence[int]) -> bytes:
    """Sample keys as `EventModel.keys` has them."""
    return struct.pack(f"<{len(keys)}q", *keys)


def unpack_keys(packed: bytes) -> tuple[int, ...]:
    """The keys of `pack_keys`."""
    return struct.unpack(f"<{len(packed) // 8}q", packed)
