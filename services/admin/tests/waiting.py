"""Helper of tests that wait for another thread or process."""

import threading

TIMEOUT_S = 30.0


def until(condition, seconds=TIMEOUT_S):
    """Return the first true value of a condition."""
    pause = threading.Event()
    for _ in range(int(seconds / 0.01)):
        if value := condition():
            return value
        pause.wait(0.01)
    raise AssertionError(f"not within {seconds:g} s")
