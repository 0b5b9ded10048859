"""`BoundedCalls`: an end to waiting for calls that may never return, whatever time-out they take.

A client of torch's ``TCPStore`` reads its answer without a time limit of its own while the server's
process is stopped, and holds a lock meanwhile that its other calls need.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_Found = TypeVar("_Found")


class BoundedCalls:
    """Calls of one thing, one at a time, each in a thread that the process does not wait for.

    One that was given up may still be carried out later; none that follows overtakes it.
    """

    def __init__(self) -> None:
        self._free = threading.Lock()

    def call(self, function: Callable[[], _Found], timeout_s: float) -> _Found:
        """What a function returns or raises.

        Raises:
            TimeoutError: it, or one that was given up before, did not return in time.
        """
        until = time.monotonic() + timeout_s
        if not self._free.acquire(timeout=max(0.0, timeout_s)):
            raise TimeoutError
        found: Future[_Found] = Future()

        def run() -> None:
            try:
                found.set_result(function())
            except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
                found.set_exception(error)
            finally:
                self._free.release()

        try:
            threading.Thread(target=run, name="refit-barrier", daemon=True).start()
        except BaseException:
            self._free.release()
            raise
        return found.result(max(0.0, until - time.monotonic()))
