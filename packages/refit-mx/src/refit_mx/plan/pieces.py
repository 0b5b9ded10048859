"""Cutting long reads into pieces that can be verified one by one, while the next ones arrive."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from refit_mx.manifest import BLOCK_BYTES
from refit_mx.plan.planner import Plan
from refit_mx.plan.shards import ShardTable
from refit_mx.reads import ReadTable

PIECE_BYTES = 16 << 20
"""Of a piece at most. Smaller ones cost NIXL more in calls than the processor's cache gives back:
for 0.5 GiB a sixth more time with 4 MiB, a third more with 2."""

assert PIECE_BYTES % BLOCK_BYTES == 0


def in_pieces(shards: ShardTable, plan: Plan) -> Plan:
    """The same plan, its long contiguous reads cut where blocks of their shards begin.

    So no block of a shard, which is what has a digest, lies in two pieces.
    """
    fetches, shard_of_read = [], []
    for (source, reads), shard in zip(plan.fetches, plan.shard_of_read, strict=True):
        begin = reads.rows[:, 0] - shards.arena_offsets[source][shard]
        cut, origin = _cut(reads.rows, begin)
        fetches.append((source, ReadTable(cut)))
        shard_of_read.append(shard[origin])
    return replace(plan, fetches=tuple(fetches), shard_of_read=tuple(shard_of_read))


def _cut(
    rows: npt.NDArray[np.int64], begin: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The rows in pieces, and the row that each piece is of."""
    run, one_run = rows[:, 2], (rows[:, 3] == 1) & (rows[:, 6] == 1)
    # Pieces end at multiples of their size, counted from the beginning of the shard.
    lead = begin % PIECE_BYTES
    counts = np.where(one_run & (run > PIECE_BYTES), -(-(lead + run) // PIECE_BYTES), 1)
    origin = np.repeat(np.arange(len(rows)), counts)
    if len(origin) == len(rows):
        return rows, origin
    number = np.arange(len(origin)) - np.repeat(np.cumsum(counts) - counts, counts)
    several = counts[origin] > 1
    first = np.maximum(number * PIECE_BYTES - lead[origin], 0)
    stop = np.minimum((number + 1) * PIECE_BYTES - lead[origin], run[origin])
    made = rows[origin]
    made[:, 0] += np.where(several, first, 0)
    made[:, 1] += np.where(several, first, 0)
    made[:, 2] = np.where(several, stop - first, made[:, 2])
    return made, origin
