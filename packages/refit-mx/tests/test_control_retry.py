"""Idempotent calls to a silent control plane are retried until a deadline."""

from __future__ import annotations

import pytest

from refit_mx import (
    ControlClient,
    ControlError,
    ControlUnavailableError,
    Deadline,
    RefitTimeoutError,
    retry_idempotent,
)


class Answers:
    """A call that raises one error after the other, then answers."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.timeouts: list[float] = []

    def __call__(self, control: ControlClient) -> str:
        self.timeouts.append(control.rpc_timeout_s)
        if self.errors:
            raise self.errors.pop(0)
        return "answer"


@pytest.fixture
def control():
    with ControlClient("127.0.0.1:1", rpc_timeout_s=3.0) as client:
        yield client


def test_call_is_retried_while_unavailable_or_silent(control):
    call = Answers(ControlUnavailableError("away"), RefitTimeoutError("silent"))
    deadline = Deadline(20.0, "asking")
    assert retry_idempotent(control, call, deadline=deadline, retry_s=20.0) == "answer"
    assert call.timeouts == [3.0, 3.0, 3.0]
    assert control.rpc_timeout_s == 3.0


def test_refusal_is_not_retried(control):
    call = Answers(ControlError("no"))
    with pytest.raises(ControlError, match="no"):
        retry_idempotent(control, call, deadline=Deadline(20.0, "asking"), retry_s=20.0)
    assert len(call.timeouts) == 1


@pytest.mark.parametrize(("retry_s", "timeout_s"), [(0.25, 20.0), (20.0, 0.25)])
def test_retries_end_with_the_last_error(control, retry_s, timeout_s):
    call = Answers(*(ControlUnavailableError(f"away {number}") for number in range(1000)))
    with pytest.raises(ControlUnavailableError, match="away"):
        retry_idempotent(control, call, deadline=Deadline(timeout_s, "asking"), retry_s=retry_s)
    assert 1 <= len(call.timeouts) <= 4
    assert all(timeout <= timeout_s for timeout in call.timeouts)


def test_passed_deadline_is_reported(control):
    deadline = Deadline(0.001, "asking")
    while deadline.left_s:
        pass
    with pytest.raises(RefitTimeoutError, match="asking: not done"):
        retry_idempotent(control, Answers(), deadline=deadline, retry_s=1.0)
