"""`Deadline`: the moment by which an operation must be done, including all its waits."""

from __future__ import annotations

import math
import time

from refit_mx.errors import RefitTimeoutError

_WAIT_PART = 1 / 8
"""Longest wait, as a fraction of the stall limit. Progress is recorded after each wait, so a stall
is detected at most one wait late."""


class Deadline:
    """A moment of the monotonic clock by which an operation must be done.

    Args:
        timeout_s: seconds from now; must be positive.
        what: the operation, for the error's message.

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
        """Seconds that remain; 0 once the deadline has passed."""
        return max(0.0, self._at - time.monotonic())

    @property
    def max_wait_s(self) -> float:
        """Longest single wait; after it, `record_progress` should be called if data arrived."""
        return math.inf

    def record_progress(self) -> None:
        """Record progress; a plain deadline ignores it."""

    def check(self, doing: str = "") -> float:
        """Return the seconds that remain, more than 0.

        Args:
            doing: the current activity, for the message.

        Raises:
            RefitTimeoutError: the deadline has passed.
        """
        left = self.left_s
        if not left:
            raise self.error(doing)
        return left

    def error(self, doing: str = "") -> RefitTimeoutError:
        """Return the error to raise when the deadline has passed."""
        phase = f" while {doing}" if doing else ""
        return RefitTimeoutError(f"{self._what}: not done after {self._timeout_s:g} s{phase}")


class StallDeadline(Deadline):
    """A deadline that also passes when no thread has recorded progress for ``stall_s``.

    It never outlasts ``overall``, the deadline of the operation.
    """

    def __init__(self, overall: Deadline, stall_s: float, what: str) -> None:
        super().__init__(stall_s, what)
        self._overall = overall

    @property
    def left_s(self) -> float:
        """Seconds that remain if no further progress is recorded."""
        return min(super().left_s, self._overall.left_s)

    @property
    def max_wait_s(self) -> float:
        """A fraction of the stall limit, so that slow bytes are recorded before it passes."""
        return self._timeout_s * _WAIT_PART

    def record_progress(self) -> None:
        """Record progress: the stall time starts again."""
        self._at = time.monotonic() + self._timeout_s

    def error(self, doing: str = "") -> RefitTimeoutError:
        """Return the error to raise when the deadline has passed."""
        if not self._overall.left_s:
            return self._overall.error(doing)
        phase = f" while {doing}" if doing else ""
        return RefitTimeoutError(f"{self._what}: no data for {self._timeout_s:g} s{phase}")
