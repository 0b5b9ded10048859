"""The same connection to the control plane, with less time for each call."""

from __future__ import annotations

import copy

from refit_mx.control.client import ControlClient
from refit_mx.deadline import Deadline

_LEAST_S = 0.05
"""A call that is given less cannot even be answered by a server that is well."""


def bounded(control: ControlClient, deadline: Deadline, doing: str = "") -> ControlClient:
    """For calls that have to be done before a deadline. Closing it would close ``control``.

    Raises:
        RefitTimeoutError: the deadline has passed.
    """
    return with_timeout(control, deadline.check(doing))


def with_timeout(control: ControlClient, most_s: float) -> ControlClient:
    """For calls that may take ``most_s`` seconds, or what ``control`` allows if that is less."""
    found = copy.copy(control)
    found.rpc_timeout_s = max(_LEAST_S, min(control.rpc_timeout_s, most_s))
    return found
