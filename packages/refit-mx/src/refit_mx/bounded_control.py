"""Calls to the control plane that are made again while it does not answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from refit_mx.control.client import ControlClient
from refit_mx.deadline import Deadline
from refit_mx.errors import ControlUnavailableError, RefitTimeoutError

_Found = TypeVar("_Found")

PATIENCE_S = 3.0
"""For a control plane that is away: as long as one takes to be started again."""
_PAUSE_S = 0.1


def patiently(
    control: ControlClient,
    call: Callable[[ControlClient], _Found],
    *,
    deadline: Deadline,
    patience_s: float,
    doing: str = "",
) -> _Found:
    """Make a call that changes nothing twice, again while the control plane does not answer.

    Args:
        control: the connection.
        call: is given one that is bounded by the deadline.
        deadline: for everything.
        patience_s: after which the error is raised, if that is before the deadline.
        doing: for the message of the deadline.

    Raises:
        ControlUnavailableError: it could not be reached all the while.
        RefitTimeoutError: it did not answer all the while, or the deadline has passed.
        RefitError: whatever ``call`` raises.
    """
    until = time.monotonic() + min(patience_s, deadline.left_s)
    while True:
        client = control.within(deadline, doing)
        try:
            return call(client)
        except (ControlUnavailableError, RefitTimeoutError):
            if time.monotonic() + _PAUSE_S >= until:
                raise
        time.sleep(_PAUSE_S)
