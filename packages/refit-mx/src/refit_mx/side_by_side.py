"""Calls in the threads of a pool that is kept: starting a thread costs more than many a call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import TypeVar

_Item = TypeVar("_Item")
_Found = TypeVar("_Found")


class Beside:
    """Calls in the threads of a pool, while the caller's thread does something else.

    Whatever happens to the caller, an interrupt while it waits or a thread that cannot be started,
    no call is under way and none begins any more once `end` has returned or raised. After one of
    them has failed, none begins.

    Args:
        threads: of the pool.
    """

    def __init__(self, threads: Executor) -> None:
        self._threads = threads
        self._changed = threading.Condition()
        self._waiting = 0
        self._under_way = 0
        self._ended = False
        self._stopped = threading.Event()
        self._error: BaseException | None = None

    @property
    def stopped(self) -> bool:
        """Whether one of them has failed, or `stop` was called: they are to return soon."""
        return self._stopped.is_set()

    def stop(self) -> None:
        """Let `stopped` be so."""
        self._stopped.set()

    def start(self, call: Callable[[], object]) -> None:
        """Make a call in one of the threads."""
        with self._changed:
            self._waiting += 1
        # Not by its future: a pool that could not start a thread has queued the call all the same.
        self._threads.submit(self._run, call)

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until all calls are over. Returns whether they were in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting + self._under_way, timeout_s)

    def end(self) -> None:
        """Let no further call begin, and wait for those that have, however often interrupted.

        Raises:
            BaseException: the first of these interrupts.
        """
        interrupt: BaseException | None = None
        while True:
            try:
                with self._changed:
                    self._ended = True
                    while self._under_way:
                        self._changed.wait()
                break
            except BaseException as error:  # noqa: BLE001 - raised below
                self.stop()
                interrupt = interrupt or error
        if interrupt is not None:
            raise interrupt

    def check(self) -> None:
        """Raise what the first call that failed has raised, if one has."""
        if self._error is not None:
            raise self._error

    def _run(self, call: Callable[[], object]) -> None:
        with self._changed:
            self._waiting -= 1
            if self._ended or self.stopped:
                self._changed.notify_all()
                return
            self._under_way += 1
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - `check` raises it
            with self._changed:
                self._error = self._error or error
            self.stop()
        finally:
            with self._changed:
                self._under_way -= 1
                self._changed.notify_all()


def together(
    threads: Executor | None, calls: Sequence[Callable[[Callable[[], bool]], object]]
) -> None:
    """Let several calls share some work: the first in this thread, the others in those of a pool.

    No call goes on when this has returned or raised. A call that has not begun by the time that the
    first one is over never does.

    Args:
        threads: of the pool; None if there is one call.
        calls: at least one. Each is given what says whether it is to return at once, since another
            has failed.

    Raises:
        BaseException: of a call that failed.
    """
    first, *others = calls
    if threads is None or not others:
        first(lambda: False)
        return
    beside = Beside(threads)

    def stopped() -> bool:
        return beside.stopped

    try:
        for call in others:
            beside.start(partial(call, stopped))
        first(stopped)
    except BaseException:
        beside.stop()
        raise
    finally:
        beside.end()
    beside.check()


def each(
    threads: Executor, function: Callable[[_Item], _Found], items: Iterable[_Item]
) -> list[_Found]:
    """What a function makes of each item, in their order.

    No call goes on when this has returned or raised.

    Raises:
        BaseException: what the first of the calls, in their order, raised.
    """
    beside = Beside(threads)
    found: dict[int, _Found] = {}
    errors: dict[int, BaseException] = {}

    def run(index: int, item: _Item) -> None:
        try:
            found[index] = function(item)
        except BaseException as error:
            errors[index] = error
            raise

    try:
        for index, item in enumerate(items):
            beside.start(partial(run, index, item))
        beside.join()
    finally:
        beside.end()
    if errors:
        raise errors[min(errors)]
    return [found[index] for index in range(len(found))]
