"""`Observers`: reports operations to observers, whose errors do not reach the caller."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any  # Any: each observer has its own type of state

import structlog

from observability.middleware.operation import Observer, Operation

logger = structlog.get_logger("observability")


class Observers:
    """A group of observers that operations are reported to.

    Args:
        observers: observers in the order in which they begin.
    """

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)
        self._lock = threading.Lock()
        self.failures = 0
        """Number of times an observer raised."""

    @contextmanager
    def observe(self, call: Operation) -> Iterator[Operation]:
        """Report the operation that the block runs; the block fills in its sizes and samples."""
        states = [(observer, self._notify(observer.begin, call)) for observer in self._observers]
        started = time.perf_counter()
        try:
            yield call
        except BaseException as error:  # observers see every outcome
            call.error = error
            raise
        finally:
            call.wall_s = time.perf_counter() - started
            if call.started_ns is not None:  # the operation began before this block
                call.wall_s = max(0, time.time_ns() - call.started_ns) / 1e9
            for observer, state in reversed(states):
                self._notify(observer.end, call, state)

    def _notify(self, method: Callable[..., Any], call: Operation, *state: Any) -> Any:
        """Call a method of an observer and log its error.

        If the error reached the caller of a claim, the claimed samples would be lost.
        """
        try:
            return method(call, *state)
        except Exception:  # noqa: BLE001  # the user's observer may raise anything
            with self._lock:
                self.failures += 1
            logger.error(
                "data_plane_observer_failed",
                op=call.op,
                status=call.status,
                stack=traceback.format_exc(),
            )
            return None
