"""Calls in other threads: `BoundedCalls` adds a deadline to a call, `CallGroup` runs several.

`BoundedCalls` is for three library calls that may block for minutes and accept no deadline:

- NIXL connects to a peer in one call, which blocks while packets are dropped.
- A client of torch's ``TCPStore`` reads from a stopped server process.
- The resolver of host names waits for a silent name server.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from typing import TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class CallGroup:
    """Calls in the threads of a pool, while the caller's thread does something else.

    Once `end` has returned or raised, no call is running and none will start. This holds even if
    the caller is interrupted while it waits, or a thread cannot be started. After a call has
    failed, no further call starts.
    """

    def __init__(self, threads: Executor) -> None:
        self._threads = threads
        self._changed = threading.Condition()
        self._queued = 0
        self._running = 0
        self._ended = False
        self._stopped = threading.Event()
        self._error: BaseException | None = None

    def stopped(self) -> bool:
        """Return whether a call failed or `stop` was called: running calls should return soon."""
        return self._stopped.is_set()

    def stop(self) -> None:
        """Make `stopped` true, so that no further call starts and running calls return soon."""
        self._stopped.set()

    def start(self, call: Callable[[], object]) -> None:
        """Submit a call to the pool."""
        with self._changed:
            self._queued += 1
        # Counted here, not by futures: a pool that fails to start a thread still queues the call.
        self._threads.submit(self._run, call)

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until all calls have returned; return whether they did within the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queued + self._running, timeout_s)

    def end(self) -> None:
        """Let no further call start, and wait for the running ones despite interrupts.

        Raises:
            BaseException: the first interrupt.
        """
        interrupt: BaseException | None = None
        while True:
            try:
                with self._changed:
                    self._ended = True
                    while self._running:
                        self._changed.wait()
                break
            except BaseException as error:  # noqa: BLE001 - raised below
                self.stop()
                interrupt = interrupt or error
        if interrupt is not None:
            raise interrupt

    def check(self) -> None:
        """Raise the error of the first call that failed, if any."""
        if self._error is not None:
            raise self._error

    def _run(self, call: Callable[[], object]) -> None:
        with self._changed:
            self._queued -= 1
            if self._ended or self.stopped():
                self._changed.notify_all()
                return
            self._running += 1
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - `check` raises it
            with self._changed:
                self._error = self._error or error
            self.stop()
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()


def run_concurrently(
    threads: Executor | None, calls: Sequence[Callable[[Callable[[], bool]], object]]
) -> None:
    """Run calls that share one job: the first in this thread, the others in the pool.

    No call is running when this has returned or raised. A call that has not started when the first
    one returns never starts.

    Args:
        threads: the pool; None if there is one call.
        calls: at least one. Each gets a function that returns whether another call has failed; the
            call should then return at once.

    Raises:
        BaseException: the error of a call that failed.
    """
    first, *others = calls
    if threads is None or not others:
        first(lambda: False)
        return
    group = CallGroup(threads)
    try:
        for call in others:
            group.start(partial(call, group.stopped))
        first(group.stopped)
    except BaseException:  # stop the others also on an interrupt
        group.stop()
        raise
    finally:
        group.end()
    group.check()


def map_calls(
    threads: Executor, function: Callable[[_Item], _Result], items: Iterable[_Item]
) -> list[_Result]:
    """Call a function with each item in the pool; return the results in order.

    No call is running when this has returned or raised.

    Raises:
        BaseException: the error of the failed item that comes first in ``items``.
    """
    group = CallGroup(threads)
    results: dict[int, _Result] = {}
    errors: dict[int, BaseException] = {}

    def run(index: int, item: _Item) -> None:
        try:
            results[index] = function(item)
        except BaseException as error:  # the first one is raised below
            errors[index] = error
            raise

    try:
        for index, item in enumerate(items):
            group.start(partial(run, index, item))
        group.join()
    finally:
        group.end()
    if errors:
        raise errors[min(errors)]
    return [results[index] for index in range(len(results))]


def in_daemon_thread(name: str, function: Callable[[], _Result]) -> Future[_Result]:
    """Run a function in a thread that does not delay the exit of the process."""
    outcome: Future[_Result] = Future()

    def run() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:  # noqa: BLE001 - raised where the future is read
            outcome.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return outcome


class BoundedCalls:
    """Calls on one object, one at a time, each in a daemon thread.

    The thread of a call that timed out stays until that call returns. No later call starts before
    then, so at most one such thread exists.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._free = threading.Lock()

    @property
    def busy(self) -> bool:
        """True while a call is running, including one that timed out."""
        return self._free.locked()

    def call(self, function: Callable[[], _Result], timeout_s: float) -> _Result:
        """Run a function; return its result or raise its error.

        Raises:
            TimeoutError: this call, or an earlier one that timed out, did not return in time.
        """
        until = time.monotonic() + timeout_s
        if not self._free.acquire(timeout=max(0.0, timeout_s)):
            raise TimeoutError

        # Its one element is the right to release the lock. The thread takes it when it begins;
        # before that, an interrupted caller may take it.
        release_right = [None]

        def run() -> _Result:
            release_right.pop()
            try:
                return function()
            finally:
                # Before the caller has the result: it may then check `busy` at once.
                self._free.release()

        try:
            outcome = in_daemon_thread(self._name, run)
        except BaseException:  # also on an interrupt, which may come after the thread has begun
            with contextlib.suppress(IndexError):
                release_right.pop()
                self._free.release()
            raise
        return outcome.result(max(0.0, until - time.monotonic()))
