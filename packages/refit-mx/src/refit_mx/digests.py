"""Digests that notice every changed, moved or swapped byte: XXH3-128.

Of a shard, one digest for each block of it, taken once when it is published. Of reads, one for each
row, taken at the source over its arena and at the receiver over its scratch: equal where the bytes
are, whatever their strides. Not cryptographic: they guard against faults, not against forgery.
"""

from __future__ import annotations

import torch
import xxhash

from refit_mx.byte_spans import (
    CHUNK_BYTES,
    ByteSpans,
    Chunk,
    Side,
    boxes,
    check_reads,
    contiguous,
    host_bytes,
)
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
    if memory.device.type == "cpu":
        return host_block_digests(host_bytes(memory).data, offset, offset + nbytes)
    spans = ByteSpans(memory)
    digests = bytearray()
    for at in range(offset, offset + nbytes, BLOCK_BYTES):
        size = min(BLOCK_BYTES, offset + nbytes - at)
        digests += _digest(spans, [Chunk(size, [], [(at, at + size)])])
    return bytes(digests)


def host_block_digests(memory: memoryview, begin: int, end: int) -> bytes:
    """Digests of the blocks of a contiguous part of the CPU's memory that begins with a block.

    Args:
        memory: of bytes.
        begin: the first byte.
        end: the byte behind the last one, inside the memory.

    Returns:
        As `block_digests`.
    """
    made = xxhash.xxh3_128_digest
    if end - begin <= BLOCK_BYTES:
        return made(memory[begin:end]) if end > begin else b""
    return b"".join(
        [made(memory[at : min(at + BLOCK_BYTES, end)]) for at in range(begin, end, BLOCK_BYTES)]
    )


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
    sizes = (reads.rows[:, 2] * reads.rows[:, 3] * reads.rows[:, 6]).tolist()
    starts = reads.rows[:, 0 if side == "source" else 1].tolist()
    digests: list[bytes] = []
    for row, flat in enumerate(contiguous(reads, side).tolist()):
        if flat:
            parts = _blocks(starts[row], sizes[row])
        else:
            part = ReadTable(reads.rows[row : row + 1])
            parts = [Chunk(box.nbytes, [box], []) for box in boxes(part, side)]
        digests.append(_digest(spans, parts))
    return b"".join(digests)


def _blocks(start: int, size: int) -> list[Chunk]:
    stop = start + size
    ends = [*range(start + CHUNK_BYTES, stop, CHUNK_BYTES), stop]
    return [
        Chunk(end - at, [], [(at, end)]) for at, end in zip([start, *ends[:-1]], ends, strict=True)
    ]


def _digest(spans: ByteSpans, parts: list[Chunk]) -> bytes:
    if len(parts) == 1:
        found = spans.buffers(parts[0], load=True)
        if len(found) == 1:
            digest: bytes = xxhash.xxh3_128_digest(found[0])
            return digest
    state = xxhash.xxh3_128()
    for part in parts:
        for buffer in spans.buffers(part, load=True):
            state.update(buffer)
    whole: bytes = state.digest()
    return whole


# A block is loaded as one chunk.
assert BLOCK_BYTES <= CHUNK_BYTES
assert xxhash.xxh3_128().digest_size == DIGEST_BYTES
