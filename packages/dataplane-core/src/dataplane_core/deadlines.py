"""Deadlines for calls into libraries that have no deadlines, or exceed their own."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def call_within(timeout_s: float, function: Callable[[], T]) -> T:
    """Call ``function`` in a separate thread and return its result.

    After the deadline the thread keeps running until the call returns or the process ends.

    Args:
        timeout_s: deadline in seconds.
        function: runs in a copy of the caller's context.

    Raises:
        TimeoutError: the deadline passed.
        BaseException: the error that ``function`` raised.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            results.append(function())
        except BaseException as error:  # noqa: BLE001  # raised again in the caller
            errors.append(error)

    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(call,), name="call-within", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"the call did not return within {timeout_s:g} s")
    return results[0]
