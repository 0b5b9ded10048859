"""The headline: how long is too long depends on how long the steps of a run take."""

import os
import time

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

from dataplane_admin.answers import models
from dataplane_admin.ingest.limits import Limits
from dataplane_admin.ingest.spans import batch_of_spans
from dataplane_admin.pages.overview import Buckets, overview


@pytest.fixture
def service(make_app):
    return make_app().state


def tell(service, *, ago_s, seconds, step=None, run="slow"):
    """A trace that ended so long ago; of a step, or of a single call."""
    end_ns = time.time_ns() - int(ago_s * 1e9)
    data = TracesData()
    told = data.resource_spans.add()
    told.resource.attributes.add(key="service.name").value.string_value = "grpo.driver"
    told.resource.attributes.add(key="rl.run_id").value.string_value = run
    span = told.scope_spans.add().spans.add(
        trace_id=os.urandom(16),
        span_id=os.urandom(8),
        name="call" if step is None else "grpo.step",
        start_time_unix_nano=end_ns - int(seconds * 1e9),
        end_time_unix_nano=end_ns,
    )
    if step is not None:
        span.attributes.add(key="rl.step").value.int_value = step
    with pytest.MonkeyPatch.context() as then:
        then.setattr(time, "time_ns", lambda: end_ns)  # it came when it had ended
        service.store.write(batch_of_spans(data, data.SerializeToString(), Limits()))


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
        asked=0,
        ready=0,
        there=0,
        lacks={},
        blocking=[],
        claim="",
    )


def page(service, monkeypatch, *waits, stuck_after_s=60.0, run=None):
    answers = service.answers
    monkeypatch.setattr(answers, "why", lambda *, run=None: list(waits))
    return overview(answers, Buckets(answers), run, stuck_after_s=stuck_after_s)


def mood(service, monkeypatch, *waits, **asked):
    return page(service, monkeypatch, *waits, **asked).mood


@pytest.mark.parametrize("kind", ["wait", "claim", "backlog"])
@pytest.mark.parametrize(("seconds", "expected"), [(90, "moving"), (1_900, "stuck")])
def test_whatever_waits_no_longer_than_three_steps_is_not_stuck(
    service, monkeypatch, kind, seconds, expected
):
    tell(service, step=1, ago_s=630, seconds=600)
    tell(service, step=2, ago_s=30, seconds=590)
    assert mood(service, monkeypatch, wait(kind, seconds)) == expected


@pytest.mark.parametrize("run", [None, "slow"])
def test_the_longest_of_the_last_steps_counts_and_not_what_else_the_run_traces(
    service, monkeypatch, run
):
    tell(service, step=1, ago_s=640, seconds=600)
    tell(service, step=2, ago_s=35, seconds=5)
    for _ in range(15):
        tell(service, ago_s=1, seconds=0.01)
    assert mood(service, monkeypatch, wait("wait", 300), run=run) == "moving"


def test_traces_of_single_calls_do_not_hide_that_no_step_ends(service, monkeypatch):
    tell(service, step=1, ago_s=600, seconds=5)
    tell(service, ago_s=1, seconds=0.01)
    assert mood(service, monkeypatch, wait("wait", 10)) == "stuck"


@pytest.mark.parametrize("kind", ["wait", "claim"])
def test_a_run_is_judged_by_its_own_steps(service, monkeypatch, kind):
    tell(service, step=1, ago_s=30, seconds=600)
    for step in range(15):
        tell(service, step=step, run="quick", ago_s=15 - step, seconds=1)
    assert mood(service, monkeypatch, wait(kind, 300)) == "moving"
    assert mood(service, monkeypatch, wait("wait", 300, run="quick")) == "stuck"


def test_a_run_that_moves_does_not_hide_one_in_which_no_step_ends(service, monkeypatch):
    tell(service, step=1, run="quick", ago_s=1, seconds=1)
    tell(service, step=1, ago_s=600, seconds=20)
    assert mood(service, monkeypatch, wait("wait", 30)) == "stuck"
    assert mood(service, monkeypatch, wait("wait", 30, run="quick")) == "moving"


@pytest.mark.parametrize("kind", ["wait", "claim"])
def test_a_quick_run_that_is_over_does_not_hide_a_slow_one_that_moves(service, monkeypatch, kind):
    tell(service, step=1, ago_s=800, seconds=600)
    tell(service, step=2, ago_s=200, seconds=600)
    tell(service, step=9, run="quick", ago_s=100, seconds=1)
    for waits in ((), (wait(kind, 150),)):
        shown = page(service, monkeypatch, *waits)
        assert (shown.mood, shown.headline) == ("moving", "Moving: step 2 took 10 min 0 s")
        assert shown.last.facts.step == 2


def test_if_no_run_moves_the_headline_is_quiet_and_speaks_of_the_step_that_ended_last(
    service, monkeypatch
):
    tell(service, step=2, ago_s=7_200, seconds=600)
    tell(service, step=9, run="quick", ago_s=120, seconds=1)
    shown = page(service, monkeypatch)
    assert shown.mood == "quiet"
    assert shown.headline.startswith("Nothing waits; step 9 ended 2 min")
    assert shown.last.facts.step == 9


def test_nothing_is_said_not_to_wait_while_something_does(service, monkeypatch):
    tell(service, step=9, run="quick", ago_s=100, seconds=1)
    # It has told nothing else yet, so how long its steps take is not known.
    shown = page(service, monkeypatch, wait("wait", 20, run="new"))
    assert (shown.mood, shown.headline) == ("moving", "One thing waits for 20 s")


def test_steps_of_a_run_that_is_over_say_nothing_about_what_is_held_now(service, monkeypatch):
    tell(service, step=1, run="yesterday", ago_s=86_400, seconds=6_000)
    tell(service, step=1, ago_s=5, seconds=10)
    assert mood(service, monkeypatch, wait("claim", 90)) == "stuck"


def test_nothing_is_stuck_before_it_is_said_to_be(service, monkeypatch):
    tell(service, step=1, ago_s=5, seconds=10)
    assert mood(service, monkeypatch, wait("wait", 90), stuck_after_s=120) == "moving"
    assert mood(service, monkeypatch, wait("wait", 130), stuck_after_s=120) == "stuck"


@pytest.mark.parametrize("kind", ["wait", "claim"])
def test_without_a_trace_what_waits_for_long_is_stuck(service, monkeypatch, kind):
    assert mood(service, monkeypatch, wait(kind, 90)) == "stuck"


def test_the_headline_speaks_of_the_step_below_it_though_another_ends_meanwhile(
    service, monkeypatch
):
    tell(service, ago_s=2, seconds=1, step=7)
    put_together = service.answers.trace

    def meanwhile(trace_id):
        monkeypatch.setattr(service.answers, "trace", put_together)
        tell(service, ago_s=0, seconds=1, step=8)
        return put_together(trace_id)

    monkeypatch.setattr(service.answers, "trace", meanwhile)
    page = overview(service.answers, Buckets(service.answers), stuck_after_s=60.0)
    assert page.headline == "Moving: step 7 took 1.00 s"
    assert page.last.facts.step == 7
    assert [one.facts.step for one in page.steps] == [7]


@pytest.mark.parametrize("ahead_s", [86_400, -86_400])
def test_a_host_with_a_wrong_clock_neither_moves_nor_stops_a_run(service, monkeypatch, ahead_s):
    tell(service, step=1, ago_s=700, seconds=10)
    with pytest.MonkeyPatch.context() as then:
        now_ns = time.time_ns() - 650 * 10**9
        then.setattr(time, "time_ns", lambda: now_ns)
        told = TracesData()
        span = (
            told.resource_spans.add()
            .scope_spans.add()
            .spans.add(
                trace_id=os.urandom(16),
                span_id=os.urandom(8),
                name="grpo.step",
                start_time_unix_nano=now_ns + (ahead_s - 10) * 10**9,
                end_time_unix_nano=now_ns + ahead_s * 10**9,
            )
        )
        span.attributes.add(key="rl.step").value.int_value = 2
        span.attributes.add(key="rl.run_id").value.string_value = "slow"
        service.store.write(batch_of_spans(told, None, Limits()))
    shown = page(service, monkeypatch)
    assert (shown.mood, shown.headline) == ("quiet", "Nothing waits; step 2 ended 10 min 50 s ago")
