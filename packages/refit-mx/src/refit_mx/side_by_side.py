"""Calls in the threads of a pool that is kept: starting a thread costs more than many a call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future, wait
from typing import TypeVar

_Item = TypeVar("_Item")
_Found = TypeVar("_Found")


def each(
    threads: Executor, function: Callable[[_Item], _Found], items: Iterable[_Item]
) -> list[_Found]:
    """What a function makes of each item, in their order.

    No call goes on when this has returned or raised.

    Raises:
        BaseException: what the first of the calls, in their order, raised.
    """
    futures: list[Future[_Found]] = []
    try:
        futures += (threads.submit(function, item) for item in items)
        return [future.result() for future in futures]
    finally:
        settle(futures)


def settle(futures: list[Future[_Found]]) -> None:
    """Cancel the calls that have not begun, and wait for the others."""
    for future in futures:
        future.cancel()
    wait(futures)


class Beside:
    """Calls in the threads of a pool, while the caller's thread does the like.

    Whatever happens to the caller, an interrupt while it waits or a thread that cannot be started,
    no call is under way and none begins any more once `end` has returned or raised.

    Args:
        threads: as many as calls.
    """

    def __init__(self, threads: Executor) -> None:
        self._threads = threads
        self._changed = threading.Condition()
        self._under_way = 0
        self._over = False
        self._stop = threading.Event()
        self._error: BaseException | None = None

    @property
    def stopped(self) -> bool:
        """Whether one of them has failed, so that the others are to return."""
        return self._stop.is_set()

    def start(self, call: Callable[[], None]) -> None:
        """Make a call in one of the threads."""
        # Not by the future: a pool that could not start a thread has queued the call all the same.
        self._threads.submit(self._run, call)

    def stop(self) -> None:
        """Let `stopped` be so."""
        self._stop.set()

    def end(self) -> None:
        """Wait for the calls that have begun.

        Raises:
            BaseException: what the first of them raised, or what interrupted the wait.
        """
        interrupt: BaseException | None = None
        while True:
            try:
                with self._changed:
                    self._over = True
                    while self._under_way:
                        self._changed.wait()
                break
            except BaseException as error:  # noqa: BLE001 - raised below
                self._stop.set()
                interrupt = interrupt or error
        if interrupt is not None:
            raise interrupt
        if self._error is not None:
            raise self._error

    def _run(self, call: Callable[[], None]) -> None:
        with self._changed:
            if self._over:
                return
            self._under_way += 1
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - `end` raises it
            self._error = self._error or error
            self._stop.set()
        finally:
            with self._changed:
                self._under_way -= 1
                self._changed.notify_all()
