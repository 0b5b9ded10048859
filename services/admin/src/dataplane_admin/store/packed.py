"""Encodings of an event's samples.

`pack_keys` keeps the keys in reported order. `pack_blocks` serves to find the events of a sample.
Samples that were reported together have consecutive keys, so one row for 64 keys replaces up to 64
rows of single keys:

    keys 70, 71 and 130  ->  {1: 0b11000000, 2: 0b100}    block of 64 keys: bit by key
"""

from __future__ import annotations

import operator
import sys
import zlib
from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any  # Any: a column

from sqlalchemy import BigInteger, ColumnElement, Integer, and_, cast, literal, or_

from dataplane_admin.store.tables import EventSampleModel

_BLOCK = 64
_DEFLATED = 0x80
# Type codes of `array` by the bytes of a number.
_CODES = {1: "b", 2: "h", 4: "i", 8: "q"}


def pack_keys(keys: Sequence[int]) -> bytes:
    """Encode sample keys for `EventModel.keys`.

    The first byte is the size of a difference in bytes; its highest bit is set if the rest is
    deflated. The rest is the first key in eight bytes, and then the differences of consecutive
    keys, all little-endian.
    """
    if not keys:
        return b""
    steps = [after - before for before, after in pairwise(keys)]
    low, high = min(steps, default=0), max(steps, default=0)
    size = next(size for size in _CODES if -(1 << 8 * size - 1) <= low and high < 1 << 8 * size - 1)
    plain = keys[0].to_bytes(8, "little") + _little_endian(array(_CODES[size], steps)).tobytes()
    deflated = zlib.compress(plain, 6, wbits=-9)
    if len(deflated) < len(plain):
        return bytes([size | _DEFLATED]) + deflated
    return bytes([size]) + plain


def unpack_keys(packed: bytes) -> list[int]:
    """Decode what `pack_keys` returned."""
    if not packed:
        return []
    size, plain = packed[0], packed[1:]
    if size & _DEFLATED:
        size, plain = size ^ _DEFLATED, zlib.decompress(plain, wbits=-9)
    steps = array(_CODES[size])
    steps.frombytes(plain[8:])
    first = int.from_bytes(plain[:8], "little")
    return list(accumulate(_little_endian(steps), operator.add, initial=first))


def pack_blocks(keys: Iterable[int]) -> dict[int, int]:
    """Return the members of each block of keys, as a signed integer of 64 bits."""
    blocks: dict[int, int] = {}
    for key in keys:
        block, bit = divmod(key, _BLOCK)
        blocks[block] = blocks.get(block, 0) | 1 << bit
    return {block: _signed(members) for block, members in blocks.items()}


def unpack_block(block: int, members: int) -> list[int]:
    """Return the keys of one block."""
    return [block * _BLOCK + bit for bit in range(_BLOCK) if members >> bit & 1]


def names_any(keys: Iterable[int]) -> ColumnElement[bool]:
    """Return the condition that an `EventSampleModel` has any of these keys."""
    members = EventSampleModel.members
    return or_(
        *(
            and_(EventSampleModel.block == block, members.bitwise_and(bits) != 0)
            for block, bits in pack_blocks(keys).items()
        )
    )


def names(key: Any) -> ColumnElement[bool]:
    """Return the condition that an `EventSampleModel` has the key in a column."""
    bit = literal(1, BigInteger).bitwise_lshift(cast(key % _BLOCK, Integer))
    return and_(
        EventSampleModel.block == key // _BLOCK, EventSampleModel.members.bitwise_and(bit) != 0
    )


def _signed(bits: int) -> int:
    return bits - (1 << _BLOCK) if bits >> _BLOCK - 1 else bits


def _little_endian(numbers: array[int]) -> array[int]:
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
