"""`ReadyThreads`: threads that are there before they are needed.

From Python 3.12 on none can be started once the interpreter is ending, which is when what a program
has told last still has to be sent.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress


class ReadyThreads:
    """Runs what may wait for long, so that the caller can wait for as long as it likes.

    Args:
        count: of threads. What is to run while all of them are busy waits for one of them.
    """

    def __init__(self, count: int) -> None:
        self._actions: queue.SimpleQueue[tuple[Callable[[], object], threading.Event] | None] = (
            queue.SimpleQueue()
        )
        self._count = count
        for _ in range(count):
            threading.Thread(target=self._run, name="observability", daemon=True).start()

    def start(self, actions: Iterable[Callable[[], object]]) -> list[threading.Event]:
        """Run each in a thread of its own. Safe in a signal handler, as a `queue.SimpleQueue` is.

        Returns:
            Of each, what is set when it is over; what it raised is nowhere told.
        """
        found = []
        for action in actions:
            over = threading.Event()
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
            # Without the stack trace of a thread: the reason has been told and the loss is counted.
            with suppress(Exception):
                action()
            over.set()


def all_over(actions: Sequence[threading.Event], deadline: float) -> bool:
    """Wait for what `ReadyThreads.start` returned, until ``deadline`` of `time.monotonic`."""
    return all(over.wait(max(deadline - time.monotonic(), 0)) for over in actions)
