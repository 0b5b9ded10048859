"""The headline: the limit of waits depends on the step duration of a run.

Waits and claims are made up: a test cannot block for half an hour.
So internals are imported.
"""

import time

import pytest

from dataplane_admin import models
from dataplane_admin.pages.overview import Buckets, overview


@pytest.fixture
def send(job, otlp):
    """Send a trace that finished ``ago_s`` seconds ago, of a step or of a single call."""

    def trace(*, ago_s, seconds, step=None, run="slow", clock_s=0):
        now_ns = time.time_ns() - int(ago_s * 1e9)
        start_s = (now_ns - otlp.start_ns) / 1e9 - seconds + clock_s
        name = "call" if step is None else "grpo.step"
        with pytest.MonkeyPatch.context() as then:
            then.setattr(time, "time_ns", lambda: now_ns)  # it arrived when it finished
            facts = {"run": run, "step": step, "names": [name]}
            job.send(otlp.trace(start_s=start_s, seconds=seconds, **facts))

    return trace


def wait(kind, seconds, run="slow"):
    return models.Wait(
        kind=kind,
        sentence="it waits",
        task="train",
        process="",
        partition="train",
        run_id=run if kind == "wait" else "",
        step=None,
        since_ns=0,
        seconds=seconds,
        silent_s=None,
        requested=0,
        ready=0,
        present=0,
        lacks={},
        blocking=[],
        claim="",
    )


def page(job, monkeypatch, *waits, stuck_after_s=60.0, run=None):
    service = job.app.state.service
    monkeypatch.setattr(service, "why", lambda *, run=None: list(waits))
    return overview(service, Buckets(service), run, stuck_after_s=stuck_after_s)


def state(job, monkeypatch, *waits, **query):
    return page(job, monkeypatch, *waits, **query).state


@pytest.mark.parametrize("kind", ["wait", "claim", "backlog"])
@pytest.mark.parametrize(("seconds", "expected"), [(90, "moving"), (1_900, "stuck")])
def test_waits_up_to_three_step_durations_are_not_stuck(
    job, send, monkeypatch, kind, seconds, expected
):
    send(step=1, ago_s=630, seconds=600)
    send(step=2, ago_s=30, seconds=590)
    assert state(job, monkeypatch, wait(kind, seconds)) == expected


@pytest.mark.parametrize("run", [None, "slow"])
def test_only_steps_determine_the_limit_of_waits(job, send, monkeypatch, run):
    send(step=1, ago_s=640, seconds=600)
    send(step=2, ago_s=35, seconds=5)
    for _ in range(15):
        send(ago_s=1, seconds=0.01)
    assert state(job, monkeypatch, wait("wait", 300), run=run) == "moving"


def test_traces_of_calls_do_not_hide_a_stalled_run(job, send, monkeypatch):
    send(step=1, ago_s=600, seconds=5)
    send(ago_s=1, seconds=0.01)
    assert state(job, monkeypatch, wait("wait", 10)) == "stuck"


@pytest.mark.parametrize("kind", ["wait", "claim"])
def test_a_run_is_judged_by_its_own_steps(job, send, monkeypatch, kind):
    send(step=1, ago_s=30, seconds=600)
    for step in range(15):
        send(step=step, run="quick", ago_s=15 - step, seconds=1)
    assert state(job, monkeypatch, wait(kind, 300)) == "moving"
    assert state(job, monkeypatch, wait("wait", 300, run="quick")) == "stuck"


def test_a_moving_run_does_not_hide_a_stalled_one(job, send, monkeypatch):
    send(step=1, run="quick", ago_s=1, seconds=1)
    send(step=1, ago_s=600, seconds=20)
    assert state(job, monkeypatch, wait("wait", 30)) == "stuck"
    assert state(job, monkeypatch, wait("wait", 30, run="quick")) == "moving"


@pytest.mark.parametrize("kind", ["wait", "claim"])
def test_a_finished_quick_run_does_not_hide_a_moving_slow_one(job, send, monkeypatch, kind):
    send(step=1, ago_s=800, seconds=600)
    send(step=2, ago_s=200, seconds=600)
    send(step=9, run="quick", ago_s=100, seconds=1)
    for waits in ((), (wait(kind, 150),)):
        shown = page(job, monkeypatch, *waits)
        assert (shown.state, shown.headline) == ("moving", "Running: step 2 finished in 10 min 0 s")
        assert shown.last.facts.step == 2


def test_without_a_moving_run_the_headline_names_the_last_step(job, send, monkeypatch):
    send(step=2, ago_s=7_200, seconds=600)
    send(step=9, run="quick", ago_s=120, seconds=1)
    shown = page(job, monkeypatch)
    assert shown.state == "quiet"
    assert shown.headline.startswith("No task is blocked; step 9 finished 2 min")
    assert shown.last.facts.step == 9


@pytest.mark.parametrize(
    ("end", "facts", "shown"),
    [
        ("finished", {}, "Run finished"),
        ("stopped", {}, "Run stopped"),
        (
            "failed",
            {"error": "ValueError", "reason": "x" * 300},
            f"Run failed: ValueError: {'x' * 108}",
        ),
    ],
)
def test_the_headline_says_how_a_run_ended(job, otlp, send, monkeypatch, end, facts, shown):
    send(step=9, ago_s=5, seconds=1, run="run")
    job.send(otlp.run("started", "run"), otlp.run(end, "run", at_s=1, **facts))
    assert page(job, monkeypatch).headline.startswith(f"{shown}; step 9 finished ")
    send(step=10, ago_s=0, seconds=1, run="another")
    assert page(job, monkeypatch).headline == "Running: step 10 finished in 1.00 s"


def test_the_headline_never_denies_a_blocked_task(job, send, monkeypatch):
    send(step=9, run="quick", ago_s=100, seconds=1)
    # It has reported nothing else, so its step duration is unknown.
    shown = page(job, monkeypatch, wait("wait", 20, run="new"))
    assert (shown.state, shown.headline) == ("moving", "1 task blocked for 20 s")


def test_steps_of_a_finished_run_do_not_hide_old_claims(job, send, monkeypatch):
    send(step=1, run="yesterday", ago_s=86_400, seconds=6_000)
    send(step=1, ago_s=5, seconds=10)
    assert state(job, monkeypatch, wait("claim", 90)) == "stuck"


def test_nothing_is_stuck_before_stuck_after_s(job, send, monkeypatch):
    send(step=1, ago_s=5, seconds=10)
    assert state(job, monkeypatch, wait("wait", 90), stuck_after_s=120) == "moving"
    assert state(job, monkeypatch, wait("wait", 130), stuck_after_s=120) == "stuck"


@pytest.mark.parametrize("kind", ["wait", "claim"])
def test_a_long_wait_without_traces_is_stuck(job, send, monkeypatch, kind):
    assert state(job, monkeypatch, wait(kind, 90)) == "stuck"


def test_the_headline_names_a_step_of_the_table_below(job, send, monkeypatch):
    send(ago_s=2, seconds=1, step=7)
    put_together = job.app.state.service.trace

    def meanwhile(trace_id, chosen):
        monkeypatch.setattr(job.app.state.service, "trace", put_together)
        send(ago_s=0, seconds=1, step=8)
        return put_together(trace_id, chosen)

    monkeypatch.setattr(job.app.state.service, "trace", meanwhile)
    page = overview(job.app.state.service, Buckets(job.app.state.service), stuck_after_s=60.0)
    assert page.headline == "Running: step 7 finished in 1.00 s"
    assert page.last.facts.step == 7
    assert [step.facts.step for step in page.steps] == [7]


@pytest.mark.parametrize("ahead_s", [86_400, -86_400])
def test_a_host_with_a_wrong_clock_neither_moves_nor_stops_a_run(job, send, monkeypatch, ahead_s):
    send(step=1, ago_s=700, seconds=10)
    send(step=2, ago_s=650, seconds=10, clock_s=ahead_s)
    shown = page(job, monkeypatch)
    assert shown.state == "quiet"
    assert shown.headline == "No task is blocked; step 2 finished 10 min 50 s ago"
