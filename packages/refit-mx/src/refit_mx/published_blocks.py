"""`PublishedBlocks`: whether a source's memory still holds what was published.

Bytes that a receiver reads in part have no digest in the manifest, so it asks the source for one of
exactly these ranges. Taken over memory that has changed since, it would vouch for the change.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from refit_mx.digests import block_digests
from refit_mx.manifest import BLOCK_BYTES, DIGEST_BYTES
from refit_mx.reads import ReadTable


class PublishedBlocks:
    """The blocks of a version in its arena, with the digests that its manifest has.

    Args:
        offsets: of each shard in the arena, in bytes, rising.
        sizes: of each shard, in bytes.
        digests: of the blocks of all shards, one after the other.

    Raises:
        ValueError: there are more or fewer digests than blocks.
    """

    def __init__(self, offsets: Sequence[int], sizes: Sequence[int], digests: bytes) -> None:
        first, size = np.array(offsets, np.int64), np.array(sizes, np.int64)
        counts = -(-size // BLOCK_BYTES)
        number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        self._starts = np.repeat(first, counts) + number * BLOCK_BYTES
        self._stops = np.minimum(self._starts + BLOCK_BYTES, np.repeat(first + size, counts))
        if len(digests) != len(self._starts) * DIGEST_BYTES:
            raise ValueError(
                f"{len(digests)} bytes of digests for {len(self._starts)} blocks; "
                f"expected {len(self._starts) * DIGEST_BYTES}"
            )
        self._digests = digests

    def changed(self, memory: torch.Tensor, reads: ReadTable) -> tuple[int, int] | None:
        """The first block that reads reach into and that is not as it was published.

        Args:
            memory: the arena.
            reads: inside it.

        Returns:
            Its first byte in the arena and the one behind its last; None if all are.
        """
        src, _, run, n1, src1, _, n2, src2, _ = reads.rows.T
        stop = src + run + (n1 - 1) * src1 + (n2 - 1) * src2
        # +1 at the first block of each read, -1 behind its last: the sum is above 0 in between.
        edges = np.zeros(len(self._starts) + 1, np.int64)
        np.add.at(edges, np.searchsorted(self._stops, src, side="right"), 1)
        np.add.at(edges, np.searchsorted(self._starts, stop, side="left"), -1)
        for block in np.flatnonzero(np.cumsum(edges[:-1]) > 0).tolist():
            begin, end = int(self._starts[block]), int(self._stops[block])
            digest = self._digests[block * DIGEST_BYTES : (block + 1) * DIGEST_BYTES]
            if block_digests(memory, begin, end - begin) != digest:
                return begin, end
        return None
