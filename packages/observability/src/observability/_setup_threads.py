"""`ReadyThreads`: threads that are there before they are needed.

From Python 3.12 on none can be started once the interpreter is ending, which is when what a program
has told last still has to be sent.
"""

from __future__ import annotations

import _thread
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress


class Over:
    """Whether something is over.

    Not a `threading.Event`: a signal handler may wait for what the thread that it interrupts waits
    for, and would find the event's own lock held by that thread.
    """

    def __init__(self) -> None:
        self._under_way = _thread.allocate_lock()
        self._under_way.acquire()
        self._is = False

    def set(self) -> None:
        """It is. Call it once."""
        self._is = True
        self._under_way.release()

    def wait(self, timeout_s: float) -> bool:
        """Whether it is within that time."""
        if not self._is and self._under_way.acquire(timeout=max(timeout_s, 0)):
            self._under_way.release()
        return self._is


class ReadyThreads:
    """Runs what may wait for long, so that the caller can wait for as long as it likes.

    Args:
        count: of threads. What is to run while all of them are busy waits for one of them.
    """

    def __init__(self, count: int) -> None:
        self._actions: queue.SimpleQueue[tuple[Callable[[], object], Over] | None] = (
            queue.SimpleQueue()
        )
        self._count = count
        for _ in range(count):
            threading.Thread(target=self._run, name="observability", daemon=True).start()

    def start(self, actions: Iterable[Callable[[], object]]) -> list[Over]:
        """Run each in a thread of its own. Safe in a signal handler, as a `queue.SimpleQueue` is.

        Returns:
            Of each, whether it is over; what it raised is nowhere told.
        """
        found = []
        for action in actions:
            over = Over()
            self._actions.put((action, over))
            found.append(over)
        return found

    def close(self) -> None:
        """Let the threads end, each after what it does now. Call it once."""
        for _ in range(self._count):
            self._actions.put(None)

    def _run(self) -> None:
        while (todo := self._actions.get()) is not None:
            action, over = todo
            try:
                # Without a thread's stack trace: the reason has been told, the loss is counted.
                with suppress(Exception):
                    action()
            finally:
                over.set()


def all_over(actions: Sequence[Over], deadline: float) -> bool:
    """Wait for what `ReadyThreads.start` returned, until ``deadline`` of `time.monotonic`."""
    return all(over.wait(deadline - time.monotonic()) for over in actions)
