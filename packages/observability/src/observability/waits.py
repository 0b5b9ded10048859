"""`Waits`: tells of what has been waited for longer than a moment, while the wait goes on.

One thread for a process, started with the first wait, and asleep while there is none.
"""

from __future__ import annotations

import itertools
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import structlog
from opentelemetry._logs import get_logger_provider

logger = structlog.get_logger("observability")

PATIENCE_S = 1.0
"""How long something is waited for before it is told of, in seconds."""

_HURRY_MS = 5_000


class Wait:
    """One wait under way.

    Attributes:
        name: of no other wait, in whatever process: pids and ids of threads come again when a
            container is started again.
        since_ns: when it began, nanoseconds since 1970.
        told: whether it was told of.
    """

    __slots__ = ("_due", "_over", "_tell", "name", "since_ns", "told")

    def __init__(self, name: str, due: float, tell: Callable[[Wait], None]) -> None:
        self.name = name
        self.since_ns = time.time_ns()
        self.told = False
        self._due = due
        self._tell = tell
        self._over = False


class Waits:
    """The waits of a process.

    Args:
        patience_s: how long a wait goes untold, in seconds; of all waits, so they fall due in
            their order.
    """

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._start()
        # What is under way there is the parent's, which tells of it, and so may the lock be.
        os.register_at_fork(after_in_child=self._start)

    def _start(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[Wait] = deque()
        self._thread: threading.Thread | None = None
        self._idle = False
        self._process = secrets.token_hex(8)
        self._numbers = itertools.count(1)

    def begin(self, tell: Callable[[Wait], None]) -> Wait:
        """Something is waited for from now on; ``tell`` is called if it still is later.

        ``tell`` runs in a thread of its own, so what it needs of the caller's context it brings.
        """
        due = time.monotonic() + self._patience_s
        with self._changed:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="waits", daemon=True)
                with suppress(RuntimeError):  # the interpreter is ending, or has no thread to spare
                    self._thread.start()
            wait = Wait(f"{self._process}-{next(self._numbers)}", due, tell)
            self._waiting.append(wait)
            if self._idle:  # else it wakes in time by itself: a switch of threads per wait is saved
                self._changed.notify()
        return wait

    def end(self, wait: Wait) -> None:
        """It is over; it is not told of from now on."""
        with self._changed:
            wait._over = True
            while self._waiting and self._waiting[0]._over:
                self._waiting.popleft()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    self._idle = True
                    self._changed.wait()
                    self._idle = False
                first = self._waiting[0]
                remaining = first._due - time.monotonic()
                if remaining > 0:
                    self._changed.wait(remaining)
                    continue
                self._waiting.popleft()
                if first._over:
                    continue
                first.told = True
            try:
                first._tell(first)
                hurry()
            except Exception:  # whatever an exporter raises, the next wait has to be told
                logger.exception("wait_not_told")


def hurry() -> None:
    """Export the events that are queued now, since somebody may look why the run stands still."""
    flush = getattr(get_logger_provider(), "force_flush", None)
    if flush is not None:
        flush(_HURRY_MS)


waits = Waits()
"""This process's."""
