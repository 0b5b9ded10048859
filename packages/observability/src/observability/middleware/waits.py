"""`Waits`: reports of tasks blocked for more than a second, repeated while they stay blocked.

Repeated reports let a reader distinguish a wait that continues from one whose process was killed. A
process has one reporting thread; it starts with the first wait and sleeps while there is none.
"""

from __future__ import annotations

import itertools
import math
import os
import secrets
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import structlog
from opentelemetry._logs import get_logger_provider

logger = structlog.get_logger("observability")

DELAY_S = 1.0
"""Seconds from the start of a wait to its first report."""

REPORT_EVERY_S = 30.0
"""Seconds between the reports of a wait."""

_FLUSH_MS = 5_000


class Wait:
    """One open wait.

    Attributes:
        name: name that is unique across processes, even if pids repeat after a container restart.
        since_ns: start of the wait, in nanoseconds since 1970.
        report_every_s: seconds between its reports.
        reported: whether it was reported.
    """

    __slots__ = ("_due", "_ended", "_report", "name", "report_every_s", "reported", "since_ns")

    def __init__(
        self, name: str, due: float, report_every_s: float, report: Callable[[Wait], None]
    ) -> None:
        self.name = name
        self.report_every_s = report_every_s
        self.since_ns = time.time_ns()
        self.reported = False
        self._due = due
        self._report = report
        self._ended = False


class Waits:
    """The waits of a process.

    Args:
        delay_s: seconds before the first report; equal for all waits, so they fall due in order.
        report_every_s: seconds between reports of a wait; also equal for all.
    """

    def __init__(self, delay_s: float = DELAY_S, report_every_s: float = REPORT_EVERY_S) -> None:
        self._delay_s = delay_s
        self._report_every_s = report_every_s
        self._start()
        # A forked child starts without waits: the parent reports them, and may hold the lock.
        os.register_at_fork(after_in_child=self._start)

    def _start(self) -> None:
        self._changed = threading.Condition()
        # Both in the order in which they fall due.
        self._unreported: deque[Wait] = deque()
        self._reported: deque[Wait] = deque()
        self._thread: threading.Thread | None = None
        self._wakes = -math.inf
        self._process = secrets.token_hex(8)
        self._numbers = itertools.count(1)

    def begin(self, report: Callable[[Wait], None]) -> Wait:
        """Begin a wait; ``report`` is called if it has not ended after ``delay_s``.

        ``report`` runs in another thread, so it must carry the caller's context with it. It is
        called again while the wait lasts, and possibly once more just after its end.
        """
        due = time.monotonic() + self._delay_s
        with self._changed:
            if self._thread is None or not self._thread.is_alive():
                self._wakes = -math.inf
                self._thread = threading.Thread(target=self._run, name="waits", daemon=True)
                with suppress(RuntimeError):  # no thread can be started
                    self._thread.start()
            name = f"{self._process}-{next(self._numbers)}"
            wait = Wait(name, due, self._report_every_s, report)
            self._unreported.append(wait)
            if due < self._wakes:  # else the thread wakes in time without a notification
                self._wakes = due
                self._changed.notify()
        return wait

    def end(self, wait: Wait) -> None:
        """End a wait, and with it its reports."""
        with self._changed:
            wait._ended = True
            for waiting in (self._unreported, self._reported):
                while waiting and waiting[0]._ended:
                    waiting.popleft()

    def _run(self) -> None:
        while True:
            with self._changed:
                while (wait := self._next()) is None:
                    remaining = self._wakes - time.monotonic()
                    self._changed.wait(None if math.isinf(remaining) else max(remaining, 0))
                self._wakes = -math.inf
                first, wait.reported = not wait.reported, True
            try:
                wait._report(wait)
                if first:
                    flush_events()
            except Exception:  # noqa: BLE001  # an exporter's error must not stop the reports
                logger.error("wait_not_reported", stack=traceback.format_exc())

    def _next(self) -> Wait | None:
        """Return the wait that is due for a report; else None, and set `_wakes` to the next due."""
        now = time.monotonic()
        self._wakes = math.inf
        for waiting in (self._unreported, self._reported):
            while waiting and waiting[0]._due <= now:
                wait = waiting.popleft()
                if not wait._ended:
                    wait._due = now + self._report_every_s
                    self._reported.append(wait)
                    return wait
            if waiting:
                self._wakes = min(self._wakes, waiting[0]._due)
        return None


def flush_events() -> None:
    """Export the queued events now, for those who inspect a stalled run."""
    flush = getattr(get_logger_provider(), "force_flush", None)
    if flush is not None:
        flush(_FLUSH_MS)


waits = Waits()
"""The waits of this process."""
