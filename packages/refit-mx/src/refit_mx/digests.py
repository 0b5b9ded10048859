"""Digests that notice every changed, moved or swapped byte: XXH3-128.

Of a shard, one digest for each block of it, taken once when it is published. Of reads, one for each
row, taken at the source over its arena and at the receiver over its scratch: equal where the bytes
are, whatever their strides. Not cryptographic: they guard against faults, not against forgery.
"""

from __future__ import annotations

import torch
import xxhash

from refit_mx.byte_spans import CHUNK_BYTES, Box, ByteSpans, Side, boxes, check_reads
from refit_mx.manifest import BLOCK_BYTES, DIGEST_BYTES
from refit_mx.reads import ReadTable


def block_digests(memory: torch.Tensor, offset: int, nbytes: int) -> bytes:
    """Digests of the blocks of a shard.

    Args:
        memory: one contiguous uint8 tensor of one axis, on the CPU or a CUDA device.
        offset: of the shard's first byte.
        nbytes: of the shard; 0 has no blocks.

    Returns:
        `DIGEST_BYTES` for each block of `BLOCK_BYTES`, the last one shorter.

    Raises:
        ValueError: the shard is not inside the memory.
    """
    if offset < 0 or nbytes < 0 or offset + nbytes > memory.numel():
        raise ValueError(
            f"shard at {offset} of {nbytes} bytes is not inside the memory of {memory.numel()}"
        )
    spans = ByteSpans(memory)
    digests = bytearray()
    for at in range(offset, offset + nbytes, BLOCK_BYTES):
        size = min(BLOCK_BYTES, offset + nbytes - at)
        digests += _digest(spans, [Box(at, size, 1, 0, 1, 0)])
    return bytes(digests)


def digest_of_reads(memory: torch.Tensor, reads: ReadTable, *, side: Side) -> bytes:
    """A digest of each row's bytes, over its runs in the order j, i.

    Args:
        memory: the source's arena or the receiver's scratch: one contiguous uint8 tensor of one
            axis, on the CPU or a CUDA device.
        reads: inside the memory.
        side: whether it is an arena or a scratch, so which addresses of the rows count.

    Returns:
        `DIGEST_BYTES` a row.

    Raises:
        ValueError: a row reaches outside the memory.
    """
    check_reads(reads, memory.numel(), side)
    spans = ByteSpans(memory)
    digests = bytearray()
    sizes = (reads.rows[:, 2] * reads.rows[:, 3] * reads.rows[:, 6]).tolist()
    parts = boxes(reads, side)
    for size in sizes:
        row: list[Box] = []
        while size:
            row.append(next(parts))
            size -= row[-1].nbytes
        digests += _digest(spans, row)
    return bytes(digests)


def _digest(spans: ByteSpans, row: list[Box]) -> bytes:
    if len(row) == 1:
        found = spans.buffers(row, load=True)
        if len(found) == 1:
            digest: bytes = xxhash.xxh3_128_digest(found[0])
            return digest
    state = xxhash.xxh3_128()
    for box in row:
        for buffer in spans.buffers([box], load=True):
            state.update(buffer)
    whole: bytes = state.digest()
    return whole


# A block is loaded as one box.
assert BLOCK_BYTES <= CHUNK_BYTES
assert xxhash.xxh3_128().digest_size == DIGEST_BYTES
