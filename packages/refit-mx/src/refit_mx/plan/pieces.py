"""Division of long reads into pieces that are verified one by one while the next ones arrive.

shard     |0 . . . . . |P . . . . . |2P . . . . |   P = piece_bytes, counted from its start
read             |--------------------------|
pieces           |-----|------------|-------|       each block of the shard is in one piece
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from refit_mx.manifest.format import BLOCK_BYTES
from refit_mx.manifest.reads import ReadTable
from refit_mx.plan.planner import Plan
from refit_mx.plan.shards import ShardTable


def in_pieces(shards: ShardTable, plan: Plan, piece_bytes: int) -> Plan:
    """Return the plan with long contiguous reads cut at block boundaries of their shards.

    So no block of a shard, the unit of digests, spans two pieces.

    Args:
        shards: shards that the plan reads.
        plan: plan with reads of any length.
        piece_bytes: size limit of a piece; a multiple of `BLOCK_BYTES`.

    Raises:
        ValueError: ``piece_bytes`` is no such multiple.
    """
    if piece_bytes < 1 or piece_bytes % BLOCK_BYTES:
        raise ValueError(f"piece_bytes {piece_bytes}; expected a multiple of {BLOCK_BYTES}")
    source_reads, shard_of_read = [], []
    for (source, reads), shard in zip(plan.source_reads, plan.shard_of_read, strict=True):
        begin = reads.rows[:, 0] - shards.arena_offsets[source][shard]
        cut, origin = _cut(reads.rows, begin, piece_bytes)
        source_reads.append((source, ReadTable(cut)))
        shard_of_read.append(shard[origin])
    return replace(plan, source_reads=tuple(source_reads), shard_of_read=tuple(shard_of_read))


def _cut(
    rows: npt.NDArray[np.int64], begin: npt.NDArray[np.int64], piece_bytes: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the rows cut into pieces, and the row that each piece belongs to."""
    run, one_run = rows[:, 2], (rows[:, 3] == 1) & (rows[:, 6] == 1)
    # Pieces end at multiples of their size, counted from the start of the shard.
    lead = begin % piece_bytes
    counts = np.where(one_run & (run > piece_bytes), -(-(lead + run) // piece_bytes), 1)
    origin = np.repeat(np.arange(len(rows)), counts)
    if len(origin) == len(rows):
        return rows, origin
    number = np.arange(len(origin)) - np.repeat(np.cumsum(counts) - counts, counts)
    several = counts[origin] > 1
    first = np.maximum(number * piece_bytes - lead[origin], 0)
    stop = np.minimum((number + 1) * piece_bytes - lead[origin], run[origin])
    pieces = rows[origin]
    pieces[:, 0] += np.where(several, first, 0)
    pieces[:, 1] += np.where(several, first, 0)
    pieces[:, 2] = np.where(several, stop - first, pieces[:, 2])
    return pieces, origin
