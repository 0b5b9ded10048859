"""SIGTERM and a run: at once before the first step, after the step under way, and at once again."""

import signal

import pytest

from grpo_trainer.signals import GracefulStop


@pytest.fixture
def stop():
    before = signal.getsignal(signal.SIGTERM)
    made = GracefulStop()
    made.on_sigterm()
    yield made
    signal.signal(signal.SIGTERM, before)


def terminated_at_once():
    with pytest.raises(SystemExit) as raised:
        signal.raise_signal(signal.SIGTERM)
    return raised.value.code == 128 + signal.SIGTERM


def test_before_the_first_step_and_after_the_last_there_is_nothing_to_wait_for(stop):
    assert terminated_at_once()
    with stop.between_steps():
        pass
    assert terminated_at_once()
    assert not stop.asked


def test_the_first_one_asks_and_the_second_one_ends(stop):
    with stop.between_steps():
        signal.raise_signal(signal.SIGTERM)
        assert stop.asked
        assert terminated_at_once()
