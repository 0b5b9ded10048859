"""Division of reads into batches of bounded size, which several threads take one by one."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from refit_mx.manifest.reads import Int64s, ReadTable, row_parts
from refit_mx.transports.base import SourceReads


class Batch(NamedTuple):
    """Rows of a table, from ``first`` up to but not including ``stop``."""

    first: int
    stop: int
    nbytes: int

    def rows_of(self, reads: ReadTable) -> ReadTable:
        """Return the batch's rows of a table."""
        return ReadTable(reads.rows[self.first : self.stop])


def batches(
    reads: ReadTable, *, max_bytes: int, max_reads: int, max_runs: int | None = None
) -> Iterator[Batch]:
    """Yield batches of consecutive rows within all limits; a larger row gets its own batch."""
    # As lists: searching an array costs more than everything else here.
    ends = np.cumsum(reads.sizes).tolist()
    run_ends = np.cumsum(reads.rows[:, 3] * reads.rows[:, 6]).tolist()
    first, before, runs_before = 0, 0, 0
    while first < len(ends):
        stop = min(first + max_reads, bisect_right(ends, before + max_bytes, first))
        if max_runs is not None:
            stop = min(stop, bisect_right(run_ends, runs_before + max_runs, first))
        stop = max(first + 1, stop)
        yield Batch(first, stop, ends[stop - 1] - before)
        first, before, runs_before = stop, ends[stop - 1], run_ends[stop - 1]


def split_reads(
    reads: ReadTable, max_bytes: int, max_runs: int | None = None
) -> tuple[ReadTable, Int64s]:
    """Split rows so that none exceeds the given bytes and runs.

    Returns:
        The table, and for each of its rows the row of ``reads`` that it is part of, ascending.
    """
    max_runs = max_runs or np.iinfo(np.int64).max
    large = np.flatnonzero(
        (reads.sizes > max_bytes) | (reads.rows[:, 3] * reads.rows[:, 6] > max_runs)
    )
    origin = np.arange(len(reads), dtype=np.int64)
    if not len(large):
        return reads, origin
    tables: list[Int64s] = []
    origins: list[Int64s] = []
    done = 0
    for row in large.tolist():
        parts = np.array(list(row_parts(reads.rows[row].tolist(), max_bytes, max_runs)), np.int64)
        tables += [reads.rows[done:row], parts]
        origins += [origin[done:row], np.full(len(parts), row, np.int64)]
        done = row + 1
    tables.append(reads.rows[done:])
    origins.append(origin[done:])
    return ReadTable(np.concatenate(tables)), np.concatenate(origins)


class RowsDone:
    """Completed rows of a table, computed from the arrived batches of the split table.

    ``origins`` has the table's row of each split row, from `split_reads`; ``parts`` has all batches
    of the split table.
    """

    def __init__(self, origins: Int64s, parts: list[Batch]) -> None:
        self._origins = origins
        # If no row was split, every batch consists of complete rows.
        self._unsplit = not len(origins) or int(origins[-1]) + 1 == len(origins)
        rows = int(origins[-1]) + 1 if len(origins) else 0
        # Number of batches of each row that have not arrived.
        self._remaining = np.zeros(rows, np.int64)
        for batch in () if self._unsplit else parts:
            first, stop = self._rows(batch)
            self._remaining[first:stop] += 1

    def done(self, batch: Batch) -> tuple[int, int]:
        """Record the arrival of a batch; return the rows that it completes.

        They are the first row and the row after the last; equal if it completes none.
        """
        if self._unsplit:
            return batch.first, batch.stop
        first, stop = self._rows(batch)
        self._remaining[first:stop] -= 1
        # Only the first and the last row may have parts in other batches.
        if self._remaining[first]:
            first += 1
        if first < stop and self._remaining[stop - 1]:
            stop -= 1
        return first, max(first, stop)

    def _rows(self, batch: Batch) -> tuple[int, int]:
        return int(self._origins[batch.first]), int(self._origins[batch.stop - 1]) + 1


OnDone = Callable[[int, int, int], None]
"""Callback as in `refit_mx.transports.base.Transport.read`."""


class BatchQueue:
    """Queue of the batches of one source; safe to use from many threads.

    Its index is that of the source in ``source_reads`` of `Transport.read`. Its reads are split so
    that batches consist of full rows; ``count`` is the number of batches.
    """

    def __init__(
        self,
        index: int,
        source_reads: SourceReads,
        on_done: OnDone | None,
        *,
        batch_bytes: int,
        batch_reads: int,
        batch_runs: int | None = None,
    ) -> None:
        self.index = index
        self._on_done = on_done
        self.source = source_reads.source
        self.reads, origins = split_reads(source_reads.reads, batch_bytes, batch_runs)
        parts = list(
            batches(self.reads, max_bytes=batch_bytes, max_reads=batch_reads, max_runs=batch_runs)
        )
        self.count = len(parts)
        self._rows = RowsDone(origins, parts)
        self._lock = threading.Lock()
        self._remaining = deque(parts)

    def take(self) -> Batch | None:
        """Return the next batch; None if none remains."""
        try:
            return self._remaining.popleft()
        except IndexError:
            return None

    def done(self, batch: Batch) -> None:
        """Report the rows that an arrived batch completes."""
        with self._lock:
            first, stop = self._rows.done(batch)
        if self._on_done is not None and stop > first:
            self._on_done(self.index, first, stop)
