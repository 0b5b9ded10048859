"""Conversion of boxes of contiguous tensors to rows of a `ReadTable`.

From the last axis to the first, an axis is joined to the run, lengthens the loop inside it, or
becomes a separate loop. For a box of (2, 3, 4) float32 in a shard of (8, 3, 6):

    axis  size  source stride  scratch stride
    2     4     4              4                run 4 -> 16 bytes
    1     3     24             16               24 != 16 at the source: loop 1, n1 = 3
    0     2     72             48               72 == 3 * 24 and 48 == 3 * 16: n1 = 6
"""

from __future__ import annotations

import numpy as np

from refit_mx.manifest.reads import COLUMNS, Int64s


def read_rows(
    src: Int64s,
    dst: Int64s,
    shape: Int64s,
    src_stride: Int64s,
    dst_stride: Int64s,
    item_size: Int64s,
) -> tuple[Int64s, Int64s]:
    """Return rows of a `ReadTable` that copy boxes: one per box, or more if three loops remain.

    Args:
        src: int64 (n,), first byte of each box at its source.
        dst: int64 (n,), first byte in scratch.
        shape: int64 (n, axes), not empty, at most 4 axes. If the fourth axis is longer than 1, its
            elements must be adjacent at the source and in scratch. Then it joins the run, and at
            most three loops remain.
        src_stride: int64 (n, axes), bytes.
        dst_stride: int64 (n, axes), bytes.
        item_size: int64 (n,), bytes.

    Returns:
        The rows, int64 (at least n, 9), columns as in `refit_mx.manifest.reads.COLUMNS`; and the
        box of each.
    """
    count, axes = shape.shape
    run = item_size.copy()
    # Levels of a loop nest around the runs: count, step at the source, step in scratch.
    number = np.ones((count, axes), dtype=np.int64)
    src_step = np.zeros((count, axes), dtype=np.int64)
    dst_step = np.zeros((count, axes), dtype=np.int64)
    level = np.zeros(count, dtype=np.int64)
    for axis in range(axes - 1, -1, -1):
        size, a, b = shape[:, axis], src_stride[:, axis], dst_stride[:, axis]
        long = size > 1
        joins = long & (level == 0) & (a == run) & (b == run)
        run[joins] *= size[joins]
        remaining = np.flatnonzero(long & ~joins)
        if not len(remaining):
            continue
        # An axis whose step equals the extent of the level inside it only lengthens that level.
        inner = np.maximum(level[remaining] - 1, 0)
        lengthens = (
            (level[remaining] > 0)
            & (a[remaining] == src_step[remaining, inner] * number[remaining, inner])
            & (b[remaining] == dst_step[remaining, inner] * number[remaining, inner])
        )
        longer, deeper = remaining[lengthens], remaining[~lengthens]
        number[longer, level[longer] - 1] *= size[longer]
        number[deeper, level[deeper]] = size[deeper]
        src_step[deeper, level[deeper]] = a[deeper]
        dst_step[deeper, level[deeper]] = b[deeper]
        level[deeper] += 1
    box = np.arange(count)
    if axes > 2 and (level > 2).any():
        # A third loop, possible for boxes of four axes: one row for each of its steps.
        times = number[:, 2]
        box = np.repeat(box, times)
        step = np.arange(len(box)) - np.repeat(np.cumsum(times) - times, times)
        src = src[box] + step * src_step[box, 2]
        dst = dst[box] + step * dst_step[box, 2]
    rows = np.zeros((len(box), len(COLUMNS)), dtype=np.int64)
    rows[:, 0], rows[:, 1], rows[:, 2] = src, dst, run[box]
    rows[:, 3], rows[:, 6] = 1, 1
    for inner_level in range(min(2, axes)):
        rows[:, 3 + 3 * inner_level] = number[box, inner_level]
        rows[:, 4 + 3 * inner_level] = src_step[box, inner_level]
        rows[:, 5 + 3 * inner_level] = dst_step[box, inner_level]
    return rows, box
