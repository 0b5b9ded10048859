"""`Observing`: reports operations to observers; an observer's error does not reach the caller."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any  # Any: observers' own states

import structlog

from observability.middleware.operation import Observer, Operation

logger = structlog.get_logger("observability")


class Observing:
    """A reporter of operations to observers.

    Args:
        observers: observers in the order in which they begin.
    """

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)
        self._lock = threading.Lock()
        self.failures = 0
        """Number of times an observer raised."""

    @contextmanager
    def observed(self, call: Operation) -> Iterator[Operation]:
        """Report the operation that the block runs; the block fills in its sizes and samples."""
        begun = [(observer, self._guarded(observer.begin, call)) for observer in self._observers]
        started = time.perf_counter()
        try:
            yield call
        except BaseException as error:  # observers see every outcome
            call.error = error
            raise
        finally:
            call.wall_s = time.perf_counter() - started
            if call.started_ns is not None:
                call.wall_s = max(0, time.time_ns() - call.started_ns) / 1e9
            for observer, state in reversed(begun):
                self._guarded(observer.end, call, state)

    def _guarded(self, observe: Callable[..., Any], call: Operation, *state: Any) -> Any:
        """Call an observer; log its errors, since a claim that raises would lose its samples."""
        try:
            return observe(call, *state)
        except Exception:  # noqa: BLE001  # the user's listener may raise anything
            with self._lock:
                self.failures += 1
            logger.error(
                "data_plane_observer_failed",
                op=call.op,
                status=call.status,
                stack=traceback.format_exc(),
            )
            return None
