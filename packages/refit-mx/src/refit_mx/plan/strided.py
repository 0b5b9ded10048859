"""Boxes of contiguous tensors as rows of a `ReadTable`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from refit_mx.reads import COLUMNS


def read_rows(
    src: npt.NDArray[np.int64],
    dst: npt.NDArray[np.int64],
    shape: npt.NDArray[np.int64],
    src_stride: npt.NDArray[np.int64],
    dst_stride: npt.NDArray[np.int64],
    item_size: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Copies of boxes, each as one row where at most two loops are left around contiguous runs.

    Args:
        src: int64 (n,), the first byte of each box at its source.
        dst: int64 (n,), in scratch.
        shape: int64 (n, axes), not empty, at most 4 axes. Along the fourth, if it is longer than 1,
            the elements are one behind the other on both sides; so at most three loops are left.
        src_stride: int64 (n, axes), in bytes.
        dst_stride: int64 (n, axes).
        item_size: int64 (n,).

    Returns:
        The rows, int64 (at least n, 9), columns as `refit_mx.reads.COLUMNS`; and the box of each.
    """
    count, axes = shape.shape
    run = item_size.copy()
    # Levels of a loop nest around the runs: number, step at the source, step in scratch.
    number = np.ones((count, axes), dtype=np.int64)
    src_step = np.zeros((count, axes), dtype=np.int64)
    dst_step = np.zeros((count, axes), dtype=np.int64)
    level = np.zeros(count, dtype=np.int64)
    for axis in range(axes - 1, -1, -1):
        size, a, b = shape[:, axis], src_stride[:, axis], dst_stride[:, axis]
        long = size > 1
        joins = long & (level == 0) & (a == run) & (b == run)
        run[joins] *= size[joins]
        left = np.flatnonzero(long & ~joins)
        if not len(left):
            continue
        # An axis whose step is as long as the whole level inside it only lengthens that level.
        inner = np.maximum(level[left] - 1, 0)
        lengthens = (
            (level[left] > 0)
            & (a[left] == src_step[left, inner] * number[left, inner])
            & (b[left] == dst_step[left, inner] * number[left, inner])
        )
        longer, deeper = left[lengthens], left[~lengthens]
        number[longer, level[longer] - 1] *= size[longer]
        number[deeper, level[deeper]] = size[deeper]
        src_step[deeper, level[deeper]] = a[deeper]
        dst_step[deeper, level[deeper]] = b[deeper]
        level[deeper] += 1
    box = np.arange(count)
    if axes > 2 and (level > 2).any():
        # A third loop, which boxes of four axes have: one row for each of its steps.
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
