"""Decisions of the rules over any sequence of values: what is raised and cleared, and when.

Imports internals: a service sees few of the sequences.
"""

from hypothesis import given
from hypothesis import strategies as st

from dataplane_admin import models
from dataplane_admin.alerts.evaluate import Facts, RunFacts, decide
from dataplane_admin.alerts.rules import Rule

# A test over HTTP cannot go through hundreds of sequences of minutes.
BOUND, EVERY_S = 4.0, 10
VALUES = st.lists(st.sampled_from([0.0, 3.5, 3.7, 4.0, 4.1, 9.0, None]), max_size=40)


def facts(moment, value):
    """Return facts of a run with this staleness; None for a finished run."""
    run = RunFacts("run", 0.0, 0.0, 60.0, True, {"rl.staleness.mean": value}, (), {})
    runs = [] if value is None else [run]
    return Facts(moment * EVERY_S * 10**9, 1e9, runs, (), {}, knows_plane=True)


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
