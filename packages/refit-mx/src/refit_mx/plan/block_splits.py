"""Division of long reads into shorter ones, verified one by one while the next ones arrive.

shard     |0 . . . . . |P . . . . . |2P . . . . |   P = max_read_bytes, counted from its start
long read        |--------------------------|
split            |-----|------------|-------|       no cut is inside a block of the shard
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from refit_mx.manifest.format import BLOCK_BYTES
from refit_mx.manifest.reads import Int64s, ReadTable
from refit_mx.plan.planner import Plan
from refit_mx.plan.shards import ShardTable


def split_at_blocks(shards: ShardTable, plan: Plan, max_read_bytes: int) -> Plan:
    """Return the plan with long contiguous reads cut at block boundaries of their shards.

    The cuts divide no block of a shard: a block is the unit of digests.

    ``max_read_bytes`` is the size limit of a contiguous read, a multiple of `BLOCK_BYTES`.

    Raises:
        ValueError: ``max_read_bytes`` is not a multiple of `BLOCK_BYTES`, or is below 1.
    """
    if max_read_bytes < 1 or max_read_bytes % BLOCK_BYTES:
        raise ValueError(f"max_read_bytes {max_read_bytes}; expected a multiple of {BLOCK_BYTES}")
    source_reads, shard_of_read = [], []
    for (source, reads), shard in zip(plan.source_reads, plan.shard_of_read, strict=True):
        begin = reads.rows[:, 0] - shards.arena_offsets[source][shard]
        cut, origin = _split_rows(reads.rows, begin, max_read_bytes)
        source_reads.append((source, ReadTable(cut)))
        shard_of_read.append(shard[origin])
    return replace(plan, source_reads=tuple(source_reads), shard_of_read=tuple(shard_of_read))


def _split_rows(rows: Int64s, begin: Int64s, max_read_bytes: int) -> tuple[Int64s, Int64s]:
    """Return the split rows, and for each the index of the row that it was split from."""
    run, one_run = rows[:, 2], (rows[:, 3] == 1) & (rows[:, 6] == 1)
    # Cuts are at multiples of ``max_read_bytes``, counted from the start of the shard.
    lead = begin % max_read_bytes
    counts = np.where(one_run & (run > max_read_bytes), -(-(lead + run) // max_read_bytes), 1)
    origin = np.repeat(np.arange(len(rows)), counts)
    if len(origin) == len(rows):
        return rows, origin
    number = np.arange(len(origin)) - np.repeat(np.cumsum(counts) - counts, counts)
    several = counts[origin] > 1
    first = np.maximum(number * max_read_bytes - lead[origin], 0)
    stop = np.minimum((number + 1) * max_read_bytes - lead[origin], run[origin])
    split = rows[origin]
    split[:, 0] += np.where(several, first, 0)
    split[:, 1] += np.where(several, first, 0)
    split[:, 2] = np.where(several, stop - first, split[:, 2])
    return split, origin
