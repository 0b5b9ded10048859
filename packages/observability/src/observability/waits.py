"""`Waits`: tells of what has been waited for longer than a moment, again and again while it lasts.

So who reads it later can tell a wait that goes on from one whose process was killed. One thread for
a process, started with the first wait, and asleep while there is none.
"""

from __future__ import annotations

import itertools
import math
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

AGAIN_S = 30.0
"""After how long a wait that lasts is told of again, in seconds."""

_HURRY_MS = 5_000


class Wait:
    """One wait under way.

    Attributes:
        name: of no other wait, in whatever process: pids and ids of threads come again when a
            container is started again.
        since_ns: when it began, nanoseconds since 1970.
        again_s: after how long it is told of again, in seconds, and so on while it lasts.
        told: whether it was told of.
    """

    __slots__ = ("_due", "_over", "_tell", "again_s", "name", "since_ns", "told")

    def __init__(self, name: str, due: float, again_s: float, tell: Callable[[Wait], None]) -> None:
        self.name = name
        self.again_s = again_s
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
        again_s: after how long one that lasts is told of again, in seconds; likewise of all.
    """

    def __init__(self, patience_s: float = PATIENCE_S, again_s: float = AGAIN_S) -> None:
        self._patience_s = patience_s
        self._again_s = again_s
        self._start()
        # What is under way there is the parent's, which tells of it, and so may the lock be.
        os.register_at_fork(after_in_child=self._start)

    def _start(self) -> None:
        self._changed = threading.Condition()
        # Each in the order in which they fall due.
        self._untold: deque[Wait] = deque()
        self._told: deque[Wait] = deque()
        self._thread: threading.Thread | None = None
        self._wakes = -math.inf
        self._process = secrets.token_hex(8)
        self._numbers = itertools.count(1)

    def begin(self, tell: Callable[[Wait], None]) -> Wait:
        """Something is waited for from now on; ``tell`` is called if it still is later.

        ``tell`` runs in a thread of its own, so what it needs of the caller's context it brings. It
        is called again while the wait lasts, and may be once more just after its end.
        """
        due = time.monotonic() + self._patience_s
        with self._changed:
            if self._thread is None or not self._thread.is_alive():
                self._wakes = -math.inf
                self._thread = threading.Thread(target=self._run, name="waits", daemon=True)
                with suppress(RuntimeError):  # the interpreter is ending, or has no thread to spare
                    self._thread.start()
            name = f"{self._process}-{next(self._numbers)}"
            wait = Wait(name, due, self._again_s, tell)
            self._untold.append(wait)
            if due < self._wakes:  # else it wakes in time: a switch of threads per wait is saved
                self._wakes = due
                self._changed.notify()
        return wait

    def end(self, wait: Wait) -> None:
        """It is over; it is not told of from now on."""
        with self._changed:
            wait._over = True
            for waiting in (self._untold, self._told):
                while waiting and waiting[0]._over:
                    waiting.popleft()

    def _run(self) -> None:
        while True:
            with self._changed:
                while (wait := self._next()) is None:
                    remaining = self._wakes - time.monotonic()
                    self._changed.wait(None if math.isinf(remaining) else max(remaining, 0))
                self._wakes = -math.inf
                first, wait.told = not wait.told, True
            try:
                wait._tell(wait)
                if first:
                    hurry()
            except Exception:  # whatever an exporter raises, the next wait has to be told
                logger.exception("wait_not_told")

    def _next(self) -> Wait | None:
        """What is due to be told; else None, and `_wakes` is when something will be."""
        now = time.monotonic()
        self._wakes = math.inf
        for waiting in (self._untold, self._told):
            while waiting and waiting[0]._due <= now:
                wait = waiting.popleft()
                if not wait._over:
                    wait._due = now + self._again_s
                    self._told.append(wait)
                    return wait
            if waiting:
                self._wakes = min(self._wakes, waiting[0]._due)
        return None


def hurry() -> None:
    """Export the events that are queued now, since somebody may look why the run stands still."""
    flush = getattr(get_logger_provider(), "force_flush", None)
    if flush is not None:
        flush(_HURRY_MS)


waits = Waits()
"""This process's."""
