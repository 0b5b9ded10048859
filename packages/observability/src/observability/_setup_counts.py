"""The account of one signal: what was made, and what became of it.

Items are admitted before they are queued and taken out when an export begins, so the queue below
never overflows and no item leaves the account unnoticed.
"""

from __future__ import annotations

import threading
from typing import Literal, TypedDict

Signal = Literal["spans", "events", "metrics"]
"""``events`` are log records; of ``metrics`` an item is one export of all of them."""


class Counts(TypedDict):
    """What became of the items of a signal: made = exported + dropped + pending, at any moment.

    Attributes:
        made: sampled spans that ended, log records emitted, collections of metrics.
        exported: those a collector accepted.
        pending: those queued or on their way; 0 after shutdown.
        dropped: the sum of the following.
        queue_full: made while the queue was full.
        export_failed: no collector took them, or it rejected them.
        shutdown: still pending when shutdown ran out of time, or made after it.
    """

    made: int
    exported: int
    pending: int
    dropped: int
    queue_full: int
    export_failed: int
    shutdown: int


class Ledger:
    """Thread-safe account of one signal.

    Args:
        capacity: most items queued and on their way.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._clear()

    def _clear(self) -> None:
        self._lock = threading.Lock()
        self._made = self._queued = self._in_flight = 0
        self._exported = self._queue_full = self._export_failed = self._shutdown = 0
        self.closed = False

    def admit(self) -> bool:
        """An item was made. False if it has to be dropped, which is entered already."""
        with self._lock:
            self._made += 1
            if self.closed:
                self._shutdown += 1
                return False
            if self._queued + self._in_flight >= self.capacity:
                self._queue_full += 1
                return False
            self._queued += 1
            return True

    def take(self, items: int) -> bool:
        """Items leave the queue to be exported. False if they are given up already."""
        with self._lock:
            if self.closed:
                return False
            self._queued -= items
            self._in_flight += items
            return True

    def settle(self, items: int, exported: int) -> None:
        """Of ``items`` taken, so many were exported; the others failed."""
        with self._lock:
            if self.closed:
                return
            self._in_flight -= items
            self._exported += exported
            self._export_failed += items - exported

    def close(self) -> None:
        """Give up what is pending; what is made from now on is dropped. May be called again."""
        with self._lock:
            self.closed = True
            self._shutdown += self._queued + self._in_flight
            self._queued = self._in_flight = 0

    def disown(self) -> None:
        """In a forked child: the account and its lock are the parent's; start closed and empty."""
        self._clear()
        self.closed = True

    @property
    def failures(self) -> int:
        """Items whose export failed so far."""
        with self._lock:
            return self._export_failed

    def counts(self) -> Counts:
        """The account now."""
        with self._lock:
            return Counts(
                made=self._made,
                exported=self._exported,
                pending=self._queued + self._in_flight,
                dropped=self._queue_full + self._export_failed + self._shutdown,
                queue_full=self._queue_full,
                export_failed=self._export_failed,
                shutdown=self._shutdown,
            )
