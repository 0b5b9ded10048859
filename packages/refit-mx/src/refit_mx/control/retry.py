"""Retries of idempotent control-plane calls."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from refit_mx.control.client import ControlClient
from refit_mx.deadline import Deadline
from refit_mx.errors import ControlUnavailableError, RefitTimeoutError

_Result = TypeVar("_Result")

_PAUSE_S = 0.1


def retry_idempotent(
    control: ControlClient,
    call: Callable[[ControlClient], _Result],
    *,
    deadline: Deadline,
    retry_s: float,
    doing: str = "",
) -> _Result:
    """Retry an idempotent call while the control plane does not answer.

    Args:
        control: client to call with.
        call: function that makes the call; it gets a client limited by the deadline.
        deadline: time limit of all attempts.
        retry_s: time after which the error is raised, if that is before the deadline.
        doing: current activity, for the deadline's message.

    Raises:
        ControlUnavailableError: the control plane could not be reached in that time.
        RefitTimeoutError: it did not answer in that time, or the deadline has passed.
        RefitError: any other error of ``call``.
    """
    until = time.monotonic() + min(retry_s, deadline.left_s)
    while True:
        client = control.within(deadline, doing)
        try:
            return call(client)
        except (ControlUnavailableError, RefitTimeoutError):
            if time.monotonic() + _PAUSE_S >= until:
                raise
        time.sleep(_PAUSE_S)
