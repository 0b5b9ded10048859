"""Counts of the items of one signal, by outcome.

An item is admitted before the SDK queues it. No more items are admitted than the SDK's queue holds,
so the SDK never drops one, and every item is counted:

    recorded --admit--> queued --begin_export--> in flight --end_export--> exported
      |                                             |
      +--> queue_full, shutdown                     +--> export_failed

`ItemCounter.close` counts queued and in-flight items as dropped by the shutdown.
"""

from __future__ import annotations

import threading
from typing import Literal, TypedDict

Signal = Literal["spans", "events", "metrics", "steps"]
"""A kind of telemetry whose items are counted.

- ``spans``: an item is a span.
- ``events``: an item is a log record.
- ``metrics``: an item is one export of all metrics, except metrics of steps.
- ``steps``: an item is one export of the step metrics recorded since the previous export.
"""


class Counts(TypedDict):
    """The item counts of a signal; recorded = exported + dropped + pending at any moment.

    Attributes:
        recorded: finished sampled spans, emitted log records, or started exports of metrics.
        exported: items that a collector accepted.
        pending: items queued or in flight; 0 after shutdown.
        dropped: the sum of the following counts.
        queue_full: items recorded while the queue was full.
        export_failed: items whose export failed or that a collector rejected.
        shutdown: items that were pending when the shutdown timed out, or recorded after the
            shutdown.
    """

    recorded: int
    exported: int
    pending: int
    dropped: int
    queue_full: int
    export_failed: int
    shutdown: int


class ItemCounter:
    """The thread-safe counts of one signal.

    Args:
        capacity: maximum number of items queued and in flight.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._recorded = self._queued = self._in_flight = 0
        self._exported = self._queue_full = self._export_failed = self._shutdown = 0
        self.closed = False

    def admit(self) -> bool:
        """Count an item as recorded; return whether it is queued. If not, count it as dropped."""
        with self._lock:
            self._recorded += 1
            if self.closed:
                self._shutdown += 1
                return False
            if self._queued + self._in_flight >= self.capacity:
                self._queue_full += 1
                return False
            self._queued += 1
            return True

    def begin_export(self, items: int) -> bool:
        """Count items as in flight instead of queued; return False if the counter is closed."""
        with self._lock:
            if self.closed:
                return False
            self._queued -= items
            self._in_flight += items
            return True

    def end_export(self, items: int, exported: int) -> None:
        """Count ``exported`` of ``items`` in flight as exported, and the others as failed."""
        with self._lock:
            if self.closed:
                return
            self._in_flight -= items
            self._exported += exported
            self._export_failed += items - exported

    def close(self) -> None:
        """Count pending items, and all items recorded from now on, as dropped by the shutdown."""
        with self._lock:
            self.closed = True
            self._shutdown += self._queued + self._in_flight
            self._queued = self._in_flight = 0

    def reset_after_fork(self) -> None:
        """Replace the parent's counts and lock in a forked child; the counter is closed."""
        self._reset()
        self.closed = True

    def counts(self) -> Counts:
        """Return the current counts."""
        with self._lock:
            return Counts(
                recorded=self._recorded,
                exported=self._exported,
                pending=self._queued + self._in_flight,
                dropped=self._queue_full + self._export_failed + self._shutdown,
                queue_full=self._queue_full,
                export_failed=self._export_failed,
                shutdown=self._shutdown,
            )
