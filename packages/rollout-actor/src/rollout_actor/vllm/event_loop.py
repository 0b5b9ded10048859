"""`EventLoopThread`: one event loop in a thread, for all requests of a backend.

So all callers share the backend's connections and request counts, whether or not they run an event
loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar  # Any: what a coroutine sends and receives

from dataplane_core import ClosedError

T = TypeVar("T")


class EventLoopThread:
    """Event loop in a daemon thread, which the first coroutine starts."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start ``coroutine``; cancelling the future cancels it."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=self._loop.run_forever, name=self._name, daemon=True
                )
                self._thread.start()
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run ``coroutine`` and return its result; an interrupt cancels it.

        Raises:
            ClosedError: (a RuntimeError) `stop` cancelled it.
        """
        future = self.submit(coroutine)
        try:
            return future.result()
        except CancelledError:
            raise self.closed_error() from None
        except BaseException:  # an interrupt of this thread does not reach the coroutine
            future.cancel()
            raise

    def closed_error(self) -> ClosedError:
        """Return the error of a call that `stop` cancelled."""
        return ClosedError(
            f"{self._name}: closed while a call was running; call again to reopen it"
        )

    def stop(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Cancel all coroutines, run ``last`` and end the thread; the next `submit` starts another.

        Without a thread it does nothing.
        """
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is None or thread is None:
            return
        asyncio.run_coroutine_threadsafe(_cancel_all(last), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _cancel_all(last: Callable[[], Coroutine[Any, Any, None]]) -> None:
    current = asyncio.current_task()
    others = [task for task in asyncio.all_tasks() if task is not current]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await last()
