"""SIGTERM and a run: at once before the first step, else after a step; the second one at once."""

import signal

import pytest

from grpo_trainer.signals import GracefulStop


@pytest.fixture
def stop():
    before = signal.getsignal(signal.SIGTERM)
    made = GracefulStop()
    with made.on_sigterm():
        yield made
    signal.signal(signal.SIGTERM, before)


def terminated_at_once():
    with pytest.raises(SystemExit) as raised:
        signal.raise_signal(signal.SIGTERM)
    return raised.value.code == 128 + signal.SIGTERM


def test_before_the_first_step_it_ends_the_run_at_once(stop):
    assert terminated_at_once()
    assert not stop.asked


def test_the_first_one_asks_and_the_second_one_ends(stop):
    stop.steps_begin()
    signal.raise_signal(signal.SIGTERM)
    assert stop.asked
    assert terminated_at_once()


def ended_with(status, *, terminated):
    """What becomes of an exit with a status, after a SIGTERM or without one."""
    try:
        with GracefulStop().on_sigterm():
            if terminated:
                assert terminated_at_once()
            raise SystemExit(status)
    except SystemExit as ended:
        return ended.code


def test_the_status_is_that_of_sigterm_whatever_ray_made_of_it(stop):
    assert ended_with(1, terminated=True) == 128 + signal.SIGTERM  # Ray waited
    assert ended_with(signal.SIGTERM, terminated=False) == 128 + signal.SIGTERM  # Ray started


def test_another_exit_keeps_its_status(stop):
    assert ended_with(3, terminated=False) == 3
