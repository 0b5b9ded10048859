"""`Deadline`: the one moment by which a whole operation has to be done, through all its waits."""

from __future__ import annotations

import math
import time

from refit_mx.errors import RefitTimeoutError

_WAIT_PART = 1 / 8
"""Of a stall: so much later than it should a source is found that has fallen silent."""


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

    @property
    def most_wait_s(self) -> float:
        """For one wait, after which `moved` should be told of what came meanwhile."""
        return math.inf

    def moved(self) -> None:
        """Something moved, which changes nothing here."""

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


class StallDeadline(Deadline):
    """A deadline that also passes once nothing has moved for a while; any thread may say so.

    Args:
        whole: which this one never outlasts.
        stall_s: seconds without a move.
        what: is awaited, for the error's message.
    """

    def __init__(self, whole: Deadline, stall_s: float, what: str) -> None:
        super().__init__(stall_s, what)
        self._whole = whole

    @property
    def left_s(self) -> float:
        """Seconds left, unless something moves."""
        return min(super().left_s, self._whole.left_s)

    @property
    def most_wait_s(self) -> float:
        """A part of the stall: other threads must hear of bytes that come slowly."""
        return self._timeout_s * _WAIT_PART

    def moved(self) -> None:
        """Something moved: the seconds count anew."""
        self._at = time.monotonic() + self._timeout_s

    def error(self, doing: str = "") -> RefitTimeoutError:
        """What to raise when it has passed."""
        if not self._whole.left_s:
            return self._whole.error(doing)
        where = f" while {doing}" if doing else ""
        return RefitTimeoutError(f"{self._what}: nothing came for {self._timeout_s:g} s{where}")
