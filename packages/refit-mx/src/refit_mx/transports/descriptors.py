"""Reads as NIXL wants them: arrays of (address, length, device), as few rows as can be."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from refit_mx.reads import ReadTable

Columns = npt.NDArray[np.int64]
Descriptors = npt.NDArray[np.uint64]


def runs(reads: ReadTable) -> tuple[Columns, Columns, Columns]:
    """The contiguous pieces of reads; adjacent ones are joined.

    Returns:
        src, dst and length of each, int64 (pieces,).
    """
    src, dst, run, n1, src1, dst1, n2, src2, dst2 = reads.rows.T.copy()
    if (reads.rows[:, (3, 6)] > 1).any():
        joins = (n1 > 1) & (src1 == run) & (dst1 == run)
        run = np.where(joins, run * n1, run)
        n1 = np.where(joins, 1, n1)
        joins = (n1 == 1) & (n2 > 1) & (src2 == run) & (dst2 == run)
        run = np.where(joins, run * n2, run)
        n2 = np.where(joins, 1, n2)
    counts = n1 * n2
    if (counts > 1).any():
        row = np.repeat(np.arange(len(counts)), counts)
        within = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        j, i = np.divmod(within, n1[row])
        src = src[row] + j * src2[row] + i * src1[row]
        dst = dst[row] + j * dst2[row] + i * dst1[row]
        run = run[row]
    if len(run) > 1:
        ends = (src[:-1] + run[:-1] != src[1:]) | (dst[:-1] + run[:-1] != dst[1:])
        firsts = np.concatenate([[0], np.flatnonzero(ends) + 1])
        src, dst, run = src[firsts], dst[firsts], np.add.reduceat(run, firsts)
    return src, dst, run


def descriptors(at: Columns, length: Columns, address: int, device_id: int) -> Descriptors:
    """Of pieces ``at`` bytes behind ``address``: uint64 (pieces, 3)."""
    made = np.empty((len(at), 3), np.uint64)
    made[:, 0] = at.astype(np.uint64) + np.uint64(address)
    made[:, 1] = length
    made[:, 2] = device_id
    return made
