"""XXH3-128 digests that detect every changed, moved or swapped byte.

A shard has one digest per block, computed once when it is published. Reads have one digest per row,
computed at the source over its arena and at the receiver over its scratch: they are equal if the
bytes are, whatever the strides. The digests guard against faults, not against forgery.

`PublishedBlocks` checks whether a source's memory still holds what was published. The
manifest has digests of complete blocks only, so a receiver that reads a part of a block asks the
source for a digest of exactly that part. If the memory had changed since, that digest would confirm
the changed bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import xxhash

from refit_mx.manifest.byte_spans import (
    CHUNK_BYTES,
    ByteSpans,
    Chunk,
    Side,
    boxes,
    contiguous,
    host_bytes,
)
from refit_mx.manifest.format import BLOCK_BYTES, DIGEST_BYTES
from refit_mx.manifest.reads import ReadTable


def block_digests(memory: torch.Tensor, offset: int, nbytes: int) -> bytes:
    """Return the digests of the blocks of a shard of ``nbytes`` at ``offset``.

    These are `DIGEST_BYTES` for each block of `BLOCK_BYTES`, of which the last may be shorter. The
    memory is one contiguous uint8 tensor of one axis, on the CPU or a CUDA device.
    """
    if memory.device.type == "cpu":
        return host_block_digests(host_bytes(memory).data, offset, offset + nbytes)
    spans = ByteSpans(memory)
    digests = bytearray()
    for at in range(offset, offset + nbytes, BLOCK_BYTES):
        size = min(BLOCK_BYTES, offset + nbytes - at)
        digests += _digest(spans, [Chunk(size, [], [(at, at + size)])])
    return bytes(digests)


def host_block_digests(memory: memoryview, begin: int, end: int) -> bytes:
    """Return the block digests of a contiguous range of CPU memory, as from `block_digests`.

    The first block begins at the first byte of the range.
    """
    digest_of = xxhash.xxh3_128_digest
    if end - begin <= BLOCK_BYTES:
        return digest_of(memory[begin:end]) if end > begin else b""
    return b"".join(
        [
            digest_of(memory[at : min(at + BLOCK_BYTES, end)])
            for at in range(begin, end, BLOCK_BYTES)
        ]
    )


def digest_of_reads(memory: torch.Tensor, reads: ReadTable, *, side: Side) -> bytes:
    """Return `DIGEST_BYTES` for each row's bytes, in the order of `ReadTable`: over j, then i.

    The memory is the source's arena or the receiver's scratch, as in `block_digests`; ``side``
    selects the addresses of the rows. Check a peer's reads with `check_reads` first.
    """
    spans = ByteSpans(memory)
    sizes = reads.sizes.tolist()
    starts = reads.rows[:, 0 if side == "source" else 1].tolist()
    digests: list[bytes] = []
    for row, flat in enumerate(contiguous(reads, side).tolist()):
        if flat:
            parts = _blocks(starts[row], sizes[row])
        else:
            cut = boxes(reads.rows[row].tolist(), side)
            parts = [Chunk(box.nbytes, [box], []) for box in cut]
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
        buffers = spans.buffers(parts[0], load=True)
        if len(buffers) == 1:
            digest: bytes = xxhash.xxh3_128_digest(buffers[0])
            return digest
    state = xxhash.xxh3_128()
    for part in parts:
        for buffer in spans.buffers(part, load=True):
            state.update(buffer)
    total: bytes = state.digest()
    return total


# A block is loaded as one chunk.
assert BLOCK_BYTES <= CHUNK_BYTES
assert xxhash.xxh3_128().digest_size == DIGEST_BYTES


class PublishedBlocks:
    """The blocks of a version in its arena, with the digests of its manifest.

    Offsets in the arena and sizes of the shards are in bytes, offsets ascending. The digests are
    those of the blocks of all shards, concatenated.
    """

    def __init__(self, offsets: Sequence[int], sizes: Sequence[int], digests: bytes) -> None:
        first, size = np.array(offsets, np.int64), np.array(sizes, np.int64)
        counts = -(-size // BLOCK_BYTES)
        number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        self._starts = np.repeat(first, counts) + number * BLOCK_BYTES
        self._stops = np.minimum(self._starts + BLOCK_BYTES, np.repeat(first + size, counts))
        self._digests = digests

    def changed(self, memory: torch.Tensor, reads: ReadTable) -> tuple[int, int] | None:
        """Return the first block that the reads touch and that differs from what was published.

        Returns:
            Its first byte in the arena and the byte after its last; None if no block differs.
        """
        src, _, run, n1, src1, _, n2, src2, _ = reads.rows.T
        stop = src + run + (n1 - 1) * src1 + (n2 - 1) * src2
        # +1 at the first block of each read, -1 after its last: the running sum counts the reads
        # of each block.
        edges = np.zeros(len(self._starts) + 1, np.int64)
        np.add.at(edges, np.searchsorted(self._stops, src, side="right"), 1)
        np.add.at(edges, np.searchsorted(self._starts, stop, side="left"), -1)
        for block in np.flatnonzero(np.cumsum(edges[:-1]) > 0).tolist():
            begin, end = int(self._starts[block]), int(self._stops[block])
            digest = self._digests[block * DIGEST_BYTES : (block + 1) * DIGEST_BYTES]
            if block_digests(memory, begin, end - begin) != digest:
                return begin, end
        return None
