"""Calls to a control plane that does not answer are made again, for so long and no longer."""

from __future__ import annotations

import pytest

from refit_mx import (
    ControlClient,
    ControlError,
    ControlUnavailableError,
    Deadline,
    RefitTimeoutError,
    patiently,
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


def test_it_is_asked_again_while_it_is_away_or_silent(control):
    call = Answers(ControlUnavailableError("away"), RefitTimeoutError("silent"))
    deadline = Deadline(20.0, "asking")
    assert patiently(control, call, deadline=deadline, patience_s=20.0) == "answer"
    assert call.timeouts == [3.0, 3.0, 3.0]
    assert control.rpc_timeout_s == 3.0


def test_a_refusal_is_not_asked_again(control):
    call = Answers(ControlError("no"))
    with pytest.raises(ControlError, match="no"):
        patiently(control, call, deadline=Deadline(20.0, "asking"), patience_s=20.0)
    assert len(call.timeouts) == 1


@pytest.mark.parametrize(("patience_s", "timeout_s"), [(0.25, 20.0), (20.0, 0.25)])
def test_patience_ends_with_the_last_error_at_the_deadline_at_the_latest(
    control, patience_s, timeout_s
):
    call = Answers(*(ControlUnavailableError(f"away {number}") for number in range(1000)))
    with pytest.raises(ControlUnavailableError, match="away"):
        patiently(control, call, deadline=Deadline(timeout_s, "asking"), patience_s=patience_s)
    assert 1 <= len(call.timeouts) <= 4
    assert all(timeout <= timeout_s for timeout in call.timeouts)


def test_a_deadline_that_has_passed_is_told_as_such(control):
    deadline = Deadline(0.001, "asking")
    while deadline.left_s:
        pass
    with pytest.raises(RefitTimeoutError, match="asking: not done"):
        patiently(control, Answers(), deadline=deadline, patience_s=1.0)
