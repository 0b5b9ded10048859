"""SIGTERM ends a run after a step; before the first step, or if repeated, at once."""

import signal
import sys

import pytest

from grpo_trainer import GracefulStop

TERMINATED = 128 + signal.SIGTERM


@pytest.fixture
def stop():
    before = signal.getsignal(signal.SIGTERM)
    stop = GracefulStop()
    with stop.on_sigterm():
        yield stop
    signal.signal(signal.SIGTERM, before)


def ends_at_once():
    with pytest.raises(SystemExit) as raised:
        signal.raise_signal(signal.SIGTERM)
    return raised.value.code == TERMINATED


def test_sigterm_before_the_first_step_ends_the_run_at_once(stop):
    assert ends_at_once()
    assert not stop.requested


def test_first_sigterm_requests_a_stop_and_a_second_ends_the_run(stop):
    stop.start_steps()
    signal.raise_signal(signal.SIGTERM)
    assert stop.requested
    assert ends_at_once()


@pytest.mark.parametrize(
    ("status", "terminated", "expected"),
    [
        (1, True, TERMINATED),  # Ray waited
        (signal.SIGTERM, False, TERMINATED),  # Ray started
        (3, False, 3),
    ],
)
def test_sigterm_sets_status_143_for_any_ray_status(stop, status, terminated, expected):
    with pytest.raises(SystemExit) as ended, GracefulStop().on_sigterm():
        sys.exit(status if not terminated or ends_at_once() else None)
    assert ended.value.code == expected
