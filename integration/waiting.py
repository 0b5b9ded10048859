"""Wait for a state of another process."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(
    condition: Callable[[], T], timeout_s: float = 60.0, *, state: Callable[[], object] = str
) -> T:
    """Call ``condition`` until it returns a true value, and return that value.

    Args:
        condition: may raise to end the wait early.
        timeout_s: seconds until the wait fails.
        state: called after the timeout; the failure's message shows its result.
    """
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {state()}"
        time.sleep(0.02)
    return value
