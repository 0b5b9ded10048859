"""Order and liveness follow the clock of the service; times of senders are shown as they came."""

import pytest

from dataplane_admin.store import TraceFilter

DAY_S = 86_400.0


@pytest.mark.parametrize("ahead_s", [DAY_S, -DAY_S])
def test_traces_and_runs_are_listed_as_they_came(store, otlp, start_ns, ahead_s):
    store.write(otlp.spans(run="wrong", step=1, start_s=ahead_s))
    store.write(otlp.spans(run="right", step=1))
    store.write(otlp.spans(run="right", step=2, start_s=-1))
    rows, cursor = store.traces(limit=2)
    assert [(row.run_id, row.step) for row in rows] == [("right", 2), ("right", 1)]
    [last] = store.traces(TraceFilter(), cursor, 2)[0]
    assert (last.run_id, last.start_ns) == ("wrong", start_ns + int(ahead_s * 1e9))
    assert [run.run_id for run in store.runs()] == ["right", "wrong"]
    assert store.run_with_steps() == "right"
    assert [row.step for row in store.steps("right")] == [2, 1]


def test_a_run_goes_on_with_whatever_of_it_came_last(store, otlp):
    store.write(otlp.spans(run="ahead", start_s=DAY_S))
    store.write(otlp.spans(run="other"))
    store.write(otlp.event("put", ["a"], run="ahead", at_s=-DAY_S))
    assert [run.run_id for run in store.runs()] == ["ahead", "other"]
