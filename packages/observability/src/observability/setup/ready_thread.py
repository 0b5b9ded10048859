"""`ReadyThread`: a thread that is started before it is needed.

The last telemetry of a program is sent while the interpreter shuts down. Since Python 3.12, no
thread can be started then.
"""

from __future__ import annotations

import _thread
import queue
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress


class Done:
    """A flag that is set when an action finishes.

    It is not a `threading.Event`. A signal handler may wait for the same flag as the thread that it
    interrupts. With an event, it would deadlock on the event's internal lock.
    """

    def __init__(self) -> None:
        self._running = _thread.allocate_lock()
        self._running.acquire()
        self._is_set = False

    def set(self) -> None:
        """Set the flag. Call it once."""
        self._is_set = True
        self._running.release()

    def wait(self, timeout_s: float) -> bool:
        """Wait until the flag is set, at most ``timeout_s`` seconds; return whether it is set."""
        if not self._is_set and self._running.acquire(timeout=max(timeout_s, 0)):
            self._running.release()
        return self._is_set


class ReadyThread:
    """A thread that runs actions in order; callers can wait for an action with a deadline.

    Args:
        idle: function that is called whenever there was no action for ``idle_s`` seconds.
        idle_s: seconds without an action before a call of ``idle``; None never calls it.
    """

    def __init__(
        self, idle: Callable[[], object] | None = None, idle_s: float | None = None
    ) -> None:
        # `SimpleQueue.put` is safe in a signal handler.
        self._actions: queue.SimpleQueue[tuple[Callable[[], object], Done] | None] = (
            queue.SimpleQueue()
        )
        self._idle, self._idle_s = idle, idle_s
        threading.Thread(target=self._run, name="observability", daemon=True).start()

    def start(self, action: Callable[[], object]) -> Done:
        """Queue an action and return its flag; may be called in a signal handler."""
        done = Done()
        self._actions.put((action, done))
        return done

    def close(self) -> None:
        """End the thread after the queued actions."""
        self._actions.put(None)

    def _run(self) -> None:
        while True:
            try:
                item = self._actions.get(timeout=self._idle_s)
            except queue.Empty:
                item = (self._idle or (lambda: None)), Done()
            if item is None:
                return
            action, done = item
            try:
                # An exporter's error is logged and its loss counted; the thread must survive it.
                with suppress(Exception):
                    action()
            finally:
                done.set()


def wait_all(flags: Iterable[Done], deadline: float) -> bool:
    """Wait until all flags are set, at most until ``deadline``; return whether they are set.

    ``deadline`` is a time of `time.monotonic`.
    """
    return all(flag.wait(deadline - time.monotonic()) for flag in flags)
