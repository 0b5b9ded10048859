"""Cutting long reads into pieces that can be verified one by one, while the next ones arrive."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from refit_mx.manifest import BLOCK_BYTES
from refit_mx.plan.planner import Plan
from refit_mx.plan.shards import ShardTable
from refit_mx.reads import ReadTable


def in_pieces(shards: ShardTable, plan: Plan, piece_bytes: int) -> Plan:
    """The same plan, its long contiguous reads cut where blocks of their shards begin.

    So no block of a shard, which is what has a digest, lies in two pieces.

    Args:
        shards: that the plan reads.
        plan: of reads of any length.
        piece_bytes: of a piece at most; a multiple of `BLOCK_BYTES`.

    Raises:
        ValueError: it is none.
    """
    if piece_bytes < 1 or piece_bytes % BLOCK_BYTES:
        raise ValueError(f"piece_bytes {piece_bytes}; expected a multiple of {BLOCK_BYTES}")
    fetches, shard_of_read = [], []
    for (source, reads), shard in zip(plan.fetches, plan.shard_of_read, strict=True):
        begin = reads.rows[:, 0] - shards.arena_offsets[source][shard]
        cut, origin = _cut(reads.rows, begin, piece_bytes)
        fetches.append((source, ReadTable(cut)))
        shard_of_read.append(shard[origin])
    return replace(plan, fetches=tuple(fetches), shard_of_read=tuple(shard_of_read))


def _cut(
    rows: npt.NDArray[np.int64], begin: npt.NDArray[np.int64], piece_bytes: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The rows in pieces, and the row that each piece is of."""
    run, one_run = rows[:, 2], (rows[:, 3] == 1) & (rows[:, 6] == 1)
    # Pieces end at multiples of their size, counted from the beginning of the shard.
    lead = begin % piece_bytes
    counts = np.where(one_run & (run > piece_bytes), -(-(lead + run) // piece_bytes), 1)
    origin = np.repeat(np.arange(len(rows)), counts)
    if len(origin) == len(rows):
        return rows, origin
    number = np.arange(len(origin)) - np.repeat(np.cumsum(counts) - counts, counts)
    several = counts[origin] > 1
    first = np.maximum(number * piece_bytes - lead[origin], 0)
    stop = np.minimum((number + 1) * piece_bytes - lead[origin], run[origin])
    made = rows[origin]
    made[:, 0] += np.where(several, first, 0)
    made[:, 1] += np.where(several, first, 0)
    made[:, 2] = np.where(several, stop - first, made[:, 2])
    return made, origin
