"""Cutting reads into requests of bounded size, and telling which rows are complete."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from refit_mx.reads import ReadTable

Rows = npt.NDArray[np.int64]


class Batch(NamedTuple):
    """Rows ``first`` to ``last`` - 1 of a table."""

    first: int
    last: int
    nbytes: int

    def of(self, reads: ReadTable) -> ReadTable:
        """Its rows."""
        return ReadTable(reads.rows[self.first : self.last])


def batches(
    reads: ReadTable, *, most_bytes: int, most_reads: int, most_runs: int | None = None
) -> Iterator[Batch]:
    """Consecutive rows of at most so many bytes, rows and runs together, or one row with more."""
    # As lists: a search in an array costs more than all else here.
    ends = np.cumsum(_sizes(reads)).tolist()
    run_ends = np.cumsum(reads.rows[:, 3] * reads.rows[:, 6]).tolist()
    first, before, runs_before = 0, 0, 0
    while first < len(ends):
        last = min(first + most_reads, bisect_right(ends, before + most_bytes, first))
        if most_runs is not None:
            last = min(last, bisect_right(run_ends, runs_before + most_runs, first))
        last = max(first + 1, last)
        yield Batch(first, last, ends[last - 1] - before)
        first, before, runs_before = last, ends[last - 1], run_ends[last - 1]


def split_reads(
    reads: ReadTable, most_bytes: int, most_runs: int | None = None
) -> tuple[ReadTable, Rows]:
    """The same bytes in rows of at most so many bytes and runs.

    Returns:
        The table, and for each of its rows the row of ``reads`` that it is a part of, ascending.
    """
    most_runs = most_runs or np.iinfo(np.int64).max
    large = np.flatnonzero(
        (_sizes(reads) > most_bytes) | (reads.rows[:, 3] * reads.rows[:, 6] > most_runs)
    )
    whole = np.arange(len(reads), dtype=np.int64)
    if not len(large):
        return reads, whole
    tables: list[Rows] = []
    origins: list[Rows] = []
    done = 0
    for row in large.tolist():
        parts = np.array(list(_parts(reads.rows[row].tolist(), most_bytes, most_runs)), np.int64)
        tables += [reads.rows[done:row], parts]
        origins += [whole[done:row], np.full(len(parts), row, np.int64)]
        done = row + 1
    tables.append(reads.rows[done:])
    origins.append(whole[done:])
    return ReadTable(np.concatenate(tables)), np.concatenate(origins)


class RowsDone:
    """Which rows of a table are complete, as the batches of its parts are done.

    Args:
        origins: of `split_reads`.
        parts: all batches of the split table.
    """

    def __init__(self, origins: Rows, parts: list[Batch]) -> None:
        self._origins = origins
        # Rows that are not split are in one batch each.
        self._whole = not len(origins) or int(origins[-1]) + 1 == len(origins)
        rows = int(origins[-1]) + 1 if len(origins) else 0
        self._left = np.zeros(rows, np.int64)
        for batch in () if self._whole else parts:
            first, last = self._rows(batch)
            self._left[first:last] += 1

    def done(self, batch: Batch) -> tuple[int, int]:
        """A batch is there.

        Returns:
            The first row and the row behind the last one that are complete with it; equal if none.
        """
        if self._whole:
            return batch.first, batch.last
        first, last = self._rows(batch)
        self._left[first:last] -= 1
        # Only the rows at both ends may have parts in other batches.
        if self._left[first]:
            first += 1
        if first < last and self._left[last - 1]:
            last -= 1
        return first, max(first, last)

    def _rows(self, batch: Batch) -> tuple[int, int]:
        return int(self._origins[batch.first]), int(self._origins[batch.last - 1]) + 1


def _sizes(reads: ReadTable) -> Rows:
    sizes: Rows = reads.rows[:, 2] * reads.rows[:, 3] * reads.rows[:, 6]
    return sizes


def _parts(row: list[int], most_bytes: int, most_runs: int) -> Iterator[tuple[int, ...]]:
    src, dst, run, n1, src1, dst1, n2, src2, dst2 = row
    if run * n1 <= most_bytes and n1 <= most_runs:
        step = min(most_bytes // (run * n1), most_runs // n1)
        for j in range(0, n2, step):
            n = min(step, n2 - j)
            yield src + j * src2, dst + j * dst2, run, n1, src1, dst1, n, src2, dst2
        return
    step = max(1, min(most_bytes // run, most_runs))
    for j in range(n2):
        for i in range(0, n1, step):
            s, d = src + j * src2 + i * src1, dst + j * dst2 + i * dst1
            if run <= most_bytes:
                yield s, d, run, min(step, n1 - i), src1, dst1, 1, 0, 0
                continue
            for k in range(0, run, most_bytes):
                yield s + k, d + k, min(most_bytes, run - k), 1, 0, 0, 1, 0, 0
