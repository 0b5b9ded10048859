"""Decisions of the rules over any sequence of values: what is raised and cleared, and when.

Imports internals: a service sees few of the sequences.
"""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane_admin import load_rules, models
from dataplane_admin.alerts.evaluate import Facts, RunFacts, decide
from dataplane_admin.alerts.rules import Rule

# A test over HTTP cannot go through hundreds of sequences of minutes.
BOUND, EVERY_S = 4.0, 10
KNOWN = {"knows_plane": True, "knows_units": True}
VALUES = st.lists(st.sampled_from([0.0, 3.5, 3.7, 4.0, 4.1, 9.0, None]), max_size=40)


def facts(moment, value):
    """Return facts of a run with this staleness; None for a finished run."""
    run = RunFacts("run", 0.0, 0.0, 60.0, True, {"rl.staleness.mean": value}, (), {})
    runs = [] if value is None else [run]
    return Facts(moment * EVERY_S * 10**9, 1e9, runs, (), {}, {}, {}, **KNOWN)


def alert_of(measure, now_ns):
    return models.Alert(
        id=1, name=measure.rule.name, kind=measure.rule.kind, severity="warning",
        run_id=measure.run_id, subject="", value=measure.value, bound=measure.bound,
        sentence="", raised_ns=now_ns, cleared_ns=None,
    )  # fmt: skip


@given(values=VALUES, for_moments=st.integers(0, 4))
def test_alerts_change_only_after_lasting_values(values, for_moments):
    rule = Rule(name="staleness", kind="staleness", bound=BOUND, for_s=for_moments * EVERY_S)
    raised, since = [], {}
    for moment, value in enumerate(values):
        decision = decide([rule], facts(moment, value), raised, since)
        since = decision.since
        recent = values[max(0, moment - for_moments) : moment + 1]
        lasted = len(recent) == for_moments + 1
        above = lasted and all(item is not None and item > BOUND for item in recent)
        below = lasted and all(item is not None and item <= 0.9 * BOUND for item in recent)
        assert bool(decision.raised) == (not raised and above)
        assert bool(decision.cleared) == (bool(raised) and (below or value is None))
        if decision.cleared:
            raised = []
        raised += [alert_of(measure, moment) for measure in decision.raised]


HEALTHY = RunFacts(
    "run", 5.0, 60.0, 180.0, True, {"rl.staleness.mean": 2.0, "rl.logprob_gap.mean": 0.15},
    [step % 7 / 10 for step in range(40)], {},
)  # fmt: skip
WAIT = models.Wait(
    kind="wait", sentence="train waits", task="train", process="p", partition="train",
    run_id="run", step=1, since_ns=0, seconds=90.0, silent_s=None, requested=8, ready=4,
    present=4, lacks={}, blocking=[], claim="",
)  # fmt: skip


def at(minute, run=HEALTHY, waited_s=90.0, used=0.8, failed=()):
    waits = [WAIT.model_copy(update={"seconds": waited_s})]
    stores, errors = {"unit": used}, dict(failed)
    return Facts(int(minute * 60e9), 1e9, [run], waits, errors, stores, {}, **KNOWN)


FAULTS = {
    "run-failed": {"failed": {"other": "OutOfMemoryError"}},
    "no-step": {"run": replace(HEALTHY, step_s=1_900.0)},
    "blocked": {"waited_s": 700.0},
    "reward-collapsed": {"run": replace(HEALTHY, rewards=[1.0] * 20 + [0.4] * 10)},
    "telemetry-lost": {"run": replace(HEALTHY, seen_s=400.0)},
    "telemetry-dropped": {"run": replace(HEALTHY, dropped={"spans": 1})},
    "store-full": {"used": 0.95},
    "staleness": {"run": replace(HEALTHY, last={"rl.staleness.mean": 5.0})},
    "not-finite": {"run": replace(HEALTHY, last={"rl.grad_norm": math.inf})},
    "logprob-gap": {"run": replace(HEALTHY, last={"rl.logprob_gap.mean": 0.5})},
}
"""Facts that differ from those of a healthy run, by the shipped rule that they raise."""


@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_each_shipped_rule_is_raised_by_its_fault_alone(fault):
    rules = load_rules().rules
    assert {rule.name for rule in rules} == {*FAULTS}
    raised, since = set(), {}
    for minute in range(5):
        decision = decide(rules, at(minute, **FAULTS.get(fault, {})), [], since)
        since = decision.since
        raised |= {measure.rule.name for measure in decision.raised}
    assert raised == {fault} - {None}
