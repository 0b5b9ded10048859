"""`BoundedCalls`: a deadline for library calls that have none of their own.

NIXL connects to a peer in one call, which blocks for minutes while the peer's packets are dropped.
A client of torch's ``TCPStore`` reads its answer without a time limit while the server's process is
stopped. The resolver waits for a name server. Each of them holds a lock that other calls need.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_Found = TypeVar("_Found")


class BoundedCalls:
    """Calls of one object, one at a time, each in a daemon thread.

    A call that was abandoned leaves that thread behind until it returns. No later call overtakes
    it, so at most one thread is left behind.

    Args:
        name: of the threads.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._free = threading.Lock()

    @property
    def busy(self) -> bool:
        """Whether a call is under way; an abandoned one is until it returns."""
        return self._free.locked()

    def call(self, function: Callable[[], _Found], timeout_s: float) -> _Found:
        """Return what a function returns, or raise what it raises.

        Raises:
            TimeoutError: it, or a call that was abandoned before, did not return in time.
        """
        until = time.monotonic() + timeout_s
        if not self._free.acquire(timeout=max(0.0, timeout_s)):
            raise TimeoutError
        found: Future[_Found] = Future()

        def run() -> None:
            try:
                result = function()
            except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
                self._free.release()
                found.set_exception(error)
            else:
                # Before the caller goes on, who may ask whether a call is under way.
                self._free.release()
                found.set_result(result)

        try:
            threading.Thread(target=run, name=self._name, daemon=True).start()
        except BaseException:
            self._free.release()
            raise
        return found.result(max(0.0, until - time.monotonic()))
