"""`Deadline`: the one moment by which a whole operation has to be done, through all its waits."""

from __future__ import annotations

import time

from refit_mx.errors import RefitTimeoutError


class Deadline:
    """A moment of the monotonic clock.

    Args:
        timeout_s: seconds from now; must be positive.
        what: is awaited, for the error's message.

    Raises:
        ValueError: if ``timeout_s`` is not positive.
    """

    def __init__(self, timeout_s: float, what: str) -> None:
        if not timeout_s > 0:
            raise ValueError(f"{what}: timeout_s {timeout_s!r}; expected more than 0")
        self._timeout_s = timeout_s
        self._what = what
        self._at = time.monotonic() + timeout_s

    @property
    def left_s(self) -> float:
        """Seconds left; 0 once it has passed."""
        return max(0.0, self._at - time.monotonic())

    def check(self, doing: str = "") -> float:
        """Seconds left, more than 0.

        Args:
            doing: what was being done, for the message.

        Raises:
            RefitTimeoutError: it has passed.
        """
        left = self.left_s
        if not left:
            raise self.error(doing)
        return left

    def error(self, doing: str = "") -> RefitTimeoutError:
        """What to raise when the deadline has passed."""
        where = f" while {doing}" if doing else ""
        return RefitTimeoutError(f"{self._what}: not done after {self._timeout_s:g} s{where}")
