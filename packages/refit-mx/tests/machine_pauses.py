"""How long the machine kept a thread waiting: what a bound in seconds that failed is worth.

A virtual machine whose host or kernel runs nobody for half a minute fails any such bound.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_EVERY_S = 0.05


class MachinePauses:
    """The longest time, in seconds, for which a thread that asked to be woken was not."""

    longest_s = 0.0


@contextmanager
def watch_pauses() -> Iterator[MachinePauses]:
    """Watch from a thread of its own until the end."""
    pauses = MachinePauses()
    done = threading.Event()

    def watch() -> None:
        before = time.monotonic()
        while not done.wait(_EVERY_S):
            now = time.monotonic()
            pauses.longest_s = max(pauses.longest_s, now - before - _EVERY_S)
            before = now

    thread = threading.Thread(target=watch, name="machine-pauses", daemon=True)
    thread.start()
    try:
        yield pauses
    finally:
        done.set()
        thread.join()
