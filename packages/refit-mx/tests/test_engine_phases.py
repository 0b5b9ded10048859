"""The state machine of an update: every step in every phase, failures, fences, threads."""

from __future__ import annotations

import threading

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from refit_mx.engine.phases import Phase, Step, UpdatePhases
from refit_mx.errors import PhaseError

ORDER = [Step.INIT, Step.START, Step.RECEIVE, Step.FINISH]
REACHED_BY = {
    Phase.IDLE: [],
    Phase.INITIALISED: [Step.INIT],
    Phase.UPDATING: [Step.INIT, Step.START],
    Phase.RECEIVED: [Step.INIT, Step.START, Step.RECEIVE],
    Phase.CLOSED: [Step.SHUTDOWN],
}
ALLOWED = {
    (Phase.IDLE, Step.INIT),
    (Phase.INITIALISED, Step.START),
    (Phase.UPDATING, Step.RECEIVE),
    (Phase.RECEIVED, Step.FINISH),
    (Phase.INITIALISED, Step.ABORT),
    (Phase.UPDATING, Step.ABORT),
    (Phase.RECEIVED, Step.ABORT),
    *((phase, Step.SHUTDOWN) for phase in Phase),
}


def at(phase):
    phases = UpdatePhases()
    for step in REACHED_BY[phase]:
        with phases.step(step):
            pass
    assert phases.phase is phase
    return phases


def take(phases, step, work):
    with phases.step(step):
        work()


def install_half(phases):
    phases.touch_live_weights()
    raise OSError("half")


@pytest.mark.parametrize("step", Step)
@pytest.mark.parametrize("phase", Phase)
def test_hole_8_a_step_in_the_wrong_phase_raises_and_changes_nothing(phase, step):
    phases = at(phase)
    if (phase, step) in ALLOWED:
        with phases.step(step):
            pass
        return
    ran = []
    with pytest.raises(PhaseError, match=f"{step.value}: the worker is {phase.value}"):
        take(phases, step, lambda: ran.append(step))
    assert not ran
    assert phases.phase is phase


def test_a_whole_update_ends_where_the_next_one_can_start():
    phases = at(Phase.INITIALISED)
    for _ in range(3):
        for step in ORDER[1:]:
            with phases.step(step):
                pass
        assert phases.phase is Phase.INITIALISED


@pytest.mark.parametrize("step", ORDER)
def test_a_step_that_fails_ends_the_update_and_the_next_one_can_start(step):
    phases = UpdatePhases()
    for earlier in ORDER[: ORDER.index(step)]:
        with phases.step(earlier):
            pass
    with pytest.raises(ZeroDivisionError), phases.step(step):
        raise ZeroDivisionError
    assert phases.fenced is None
    again = Step.INIT if step is Step.INIT else Step.START
    with phases.step(again):
        pass


def test_a_failure_after_live_weights_were_touched_fences_until_an_install_succeeds():
    phases = at(Phase.RECEIVED)
    with pytest.raises(OSError, match="half"):
        take(phases, Step.FINISH, lambda: install_half(phases))
    assert "half" in phases.fenced
    for step in (Step.START, Step.ABORT, Step.START, Step.RECEIVE):
        with phases.step(step):
            pass
        assert phases.fenced
    with phases.step(Step.FINISH):
        phases.touch_live_weights()
        assert phases.fenced
    assert phases.fenced is None


def test_a_finish_that_touched_nothing_does_not_lift_a_fence():
    phases = at(Phase.RECEIVED)
    with pytest.raises(OSError, match="half"):
        take(phases, Step.FINISH, lambda: install_half(phases))
    for step in ORDER[1:]:
        with phases.step(step):
            pass
    assert phases.fenced


def test_live_weights_change_only_within_a_step():
    with pytest.raises(PhaseError, match="only within a step"):
        at(Phase.RECEIVED).touch_live_weights()


def test_a_step_beside_another_one_is_refused():
    phases = at(Phase.UPDATING)
    inside, leave = threading.Event(), threading.Event()

    def receive():
        with phases.step(Step.RECEIVE):
            inside.set()
            assert leave.wait(30)

    thread = threading.Thread(target=receive)
    thread.start()
    try:
        assert inside.wait(30)
        for step in Step:
            with pytest.raises(PhaseError, match="receive_weights is under way"):
                take(phases, step, lambda: None)
    finally:
        leave.set()
        thread.join(30)
    assert phases.phase is Phase.RECEIVED


class Updates(RuleBasedStateMachine):
    """Random steps, of which some fail, against the shortest description there is."""

    def __init__(self):
        super().__init__()
        self.phases = UpdatePhases()
        self.torn = False

    @rule(step=st.sampled_from([s for s in Step if s is not Step.SHUTDOWN]), fails=st.booleans())
    def take(self, step, fails):
        before = (self.phases.phase, self.phases.fenced)
        try:
            with self.phases.step(step):
                if step is Step.FINISH:
                    self.phases.touch_live_weights()
                    self.torn = True
                if fails:
                    raise OSError
                if step is Step.FINISH:
                    self.torn = False
        except PhaseError:
            assert (self.phases.phase, self.phases.fenced) == before
            assert (before[0], step) not in ALLOWED
        except OSError:
            assert (before[0], step) in ALLOWED
        else:
            assert (before[0], step) in ALLOWED

    @precondition(lambda self: self.phases.phase is Phase.INITIALISED)
    @rule()
    def update(self):
        for step in ORDER[1:]:
            self.take(step, False)

    @invariant()
    def a_torn_worker_is_fenced_and_no_other(self):
        assert self.torn == (self.phases.fenced is not None)


Updates.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestUpdates = Updates.TestCase
