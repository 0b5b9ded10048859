"""`Waits`: reports calls that are blocked for more than a second, and repeats the reports.

Because reports repeat, a reader can distinguish a wait that continues from one whose process was
killed. A process has one reporting thread. It starts with the first wait, and sleeps while there is
no wait.
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


class PendingCall:
    """One call that is reported while it is blocked.

    Attributes:
        name: unique name of the wait, also across processes and restarts of containers.
        since_ns: start of the wait, in nanoseconds since 1970.
        report_every_s: seconds between its reports.
        reported: whether it was reported at least once.
    """

    __slots__ = ("_due", "_ended", "_report", "name", "report_every_s", "reported", "since_ns")

    def __init__(
        self, name: str, due: float, report_every_s: float, report: Callable[[PendingCall], None]
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
        delay_s: seconds from the start of a wait to its first report.
        report_every_s: seconds between the reports of a wait.
    """

    def __init__(self, delay_s: float = DELAY_S, report_every_s: float = REPORT_EVERY_S) -> None:
        self._delay_s = delay_s
        self._report_every_s = report_every_s
        self._reset()
        # A forked child starts without waits, because the parent reports them. It needs a new lock,
        # because a thread of the parent may have held the old one during the fork.
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._changed = threading.Condition()
        # Both queues are in the order in which their waits are due for a report: the delay is the
        # same for all waits, and so is the interval.
        self._unreported: deque[PendingCall] = deque()
        self._reported: deque[PendingCall] = deque()
        self._thread: threading.Thread | None = None
        self._wake_at = -math.inf  # while the thread is awake
        self._process_token = secrets.token_hex(8)
        self._numbers = itertools.count(1)

    def begin(self, report: Callable[[PendingCall], None]) -> PendingCall:
        """Begin a wait; ``report`` is called if the wait is still open after ``delay_s``.

        ``report`` runs in another thread, so the caller must bind the trace context to ``report``.
        ``report`` is called repeatedly until the wait ends, and possibly once just after its end.
        """
        due = time.monotonic() + self._delay_s
        with self._changed:
            if self._thread is None or not self._thread.is_alive():
                self._wake_at = -math.inf
                self._thread = threading.Thread(target=self._run, name="waits", daemon=True)
                with suppress(RuntimeError):  # no thread can start; the next wait retries
                    self._thread.start()
            name = f"{self._process_token}-{next(self._numbers)}"
            wait = PendingCall(name, due, self._report_every_s, report)
            self._unreported.append(wait)
            if due < self._wake_at:  # else the thread wakes in time without a notification
                self._wake_at = due
                self._changed.notify()
        return wait

    def end(self, wait: PendingCall) -> None:
        """End a wait and its reports."""
        with self._changed:
            wait._ended = True
            for waits_in_order in (self._unreported, self._reported):
                while waits_in_order and waits_in_order[0]._ended:
                    waits_in_order.popleft()

    def _run(self) -> None:
        while True:
            with self._changed:
                while (wait := self._next_due()) is None:
                    remaining = self._wake_at - time.monotonic()
                    self._changed.wait(None if math.isinf(remaining) else max(remaining, 0))
                self._wake_at = -math.inf
                is_first_report, wait.reported = not wait.reported, True
            try:
                wait._report(wait)
                if is_first_report:
                    flush_events()
            except Exception:  # noqa: BLE001  # an error of one report must not stop the others
                logger.error("wait_not_reported", stack=traceback.format_exc())

    def _next_due(self) -> PendingCall | None:
        """Return a wait that is due for a report. If there is none, set when to wake next."""
        now = time.monotonic()
        self._wake_at = math.inf
        for waits_in_order in (self._unreported, self._reported):
            while waits_in_order and waits_in_order[0]._due <= now:
                wait = waits_in_order.popleft()
                if not wait._ended:
                    wait._due = now + self._report_every_s
                    self._reported.append(wait)
                    return wait
            if waits_in_order:
                self._wake_at = min(self._wake_at, waits_in_order[0]._due)
        return None


def flush_events() -> None:
    """Export the queued events now, so that an inspector of a stalled run sees them."""
    flush = getattr(get_logger_provider(), "force_flush", None)
    if flush is not None:
        flush(_FLUSH_MS)


waits = Waits()
"""The waits of this process."""
