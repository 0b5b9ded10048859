"""A deadline for calls into libraries that have none, or do not keep theirs."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def call_within(timeout_s: float, function: Callable[[], T]) -> T:
    """Call ``function`` in a thread of its own and return its result.

    A call that is late is left behind: its thread goes on, and ends with the process at the latest.

    Args:
        timeout_s: deadline in seconds.
        function: what is called, in a copy of the caller's context.

    Raises:
        TimeoutError: the deadline passed.
        BaseException: whatever ``function`` raises.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            results.append(function())
        except BaseException as error:  # noqa: BLE001  # it is raised in the caller
            errors.append(error)

    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(call,), name="call-within", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no result after {timeout_s:g} s")
    return results[0]
