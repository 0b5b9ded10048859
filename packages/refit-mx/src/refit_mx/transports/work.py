"""`Work`: what is left to read from one source, taken batch by batch by several threads."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from refit_mx.transports.base import Fetch
from refit_mx.transports.batches import Batch, RowsDone, batches, split_reads

OnDone = Callable[[int, int, int], None]
"""As `refit_mx.transports.base.Transport.fetch` has it."""


class Work:
    """Safe to use from several threads.

    Args:
        index: of the fetch.
        fetch: what to read.
        batch_bytes: of one batch.
        batch_reads: of one batch.
        batch_runs: of one batch; None for any number.

    Attributes:
        index: of the fetch.
        source: to read from.
        reads: all of them, cut so that batches are whole rows.
        count: of batches.
    """

    def __init__(
        self,
        index: int,
        fetch: Fetch,
        *,
        batch_bytes: int,
        batch_reads: int,
        batch_runs: int | None = None,
    ) -> None:
        self.index = index
        self.source = fetch.source
        self.reads, origins = split_reads(fetch.reads, batch_bytes, batch_runs)
        parts = list(
            batches(
                self.reads, most_bytes=batch_bytes, most_reads=batch_reads, most_runs=batch_runs
            )
        )
        self.count = len(parts)
        self._rows = RowsDone(origins, parts)
        self._lock = threading.Lock()
        self._left = deque(parts)

    def take(self) -> Batch | None:
        """The next batch, None if there is none."""
        try:
            return self._left.popleft()
        except IndexError:
            return None

    def done(self, batch: Batch, on_done: OnDone | None) -> None:
        """A batch is there: tell of the rows that are complete with it."""
        with self._lock:
            first, last = self._rows.done(batch)
        if on_done is not None and last > first:
            on_done(self.index, first, last)
