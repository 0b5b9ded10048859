"""Alerts: each kind is raised and cleared, without flapping, and shown everywhere.

Imports internals: a test interferes between two queries of the store.
"""

import math
import re
import shutil
import time

import pytest
import torch
from alerting import cleared, evaluate, raised, rule
from tensordict import TensorDict
from waiting import until

from dataplane_admin.store import Store
from dataplane_core import InMemoryDataPlaneClient

HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture
def now_s(otlp):
    """Return the time of the service, in seconds since the start of the tests' records."""
    return lambda: (time.time_ns() - otlp.start_ns) / 1e9


def start_run(job, otlp, now_s, run="run"):
    job.send(otlp.run("started", run, at_s=now_s()))


def test_no_step_is_raised_and_cleared_by_a_step(alerted, otlp, later, now_s):
    job = alerted(rule("no_step", 600, severity="critical"))
    start_run(job, otlp, now_s)
    job.send(otlp.trace(step=0))
    evaluate(job)
    assert raised(job) == []
    later(700)
    [alert] = until(lambda: job.get("alerts")["raised"])
    assert (alert["name"], alert["run_id"], alert["severity"]) == ("no-step", "run", "critical")
    assert alert["value"] > alert["bound"] == 600
    job.send(otlp.trace(step=1))
    until(lambda: not raised(job))
    assert cleared(job) == [("no-step", "run")]
    entries = job.all("audit", "entries")
    assert [(entry["action"], entry["target"]) for entry in entries] == [
        ("clear-alert", "run"),
        ("raise-alert", "run"),
    ]
    assert entries[0]["outcome"].startswith("cleared: within the bound: no step finished for ")
    assert entries[1]["outcome"].startswith("raised: no step finished for 11 min")


@pytest.mark.parametrize("has_start", [True, False])
@pytest.mark.parametrize("ahead_s", [21_600, -21_600])
def test_no_step_ignores_the_clock_of_a_run(alerted, otlp, later, now_s, has_start, ahead_s):
    job = alerted(rule("no_step", 600), silent_after_s=2_000)
    at_s = now_s() + ahead_s
    if has_start:
        job.send(otlp.run("started", at_s=at_s))
    else:
        job.send(otlp.trace(step=0, start_s=at_s))
    evaluate(job)
    assert raised(job) == []
    later(700)
    until(lambda: raised(job) == [("no-step", "run")])


def test_a_failed_run_is_raised_until_it_resumes(alerted, otlp, later, now_s):
    job = alerted(rule("run_failed", None))
    for run in ("run", "other"):
        start_run(job, otlp, now_s, run)
        job.send(otlp.run("failed", run, at_s=now_s(), error=f"OutOfMemoryError: {HOSTILE}"))
    until(lambda: len(raised(job)) == 2)
    [alert, _] = job.get("alerts")["raised"]
    assert alert["sentence"] == f"the run failed: OutOfMemoryError: {HOSTILE}"
    assert HOSTILE not in job.client.get("/alerts").text
    job.send(otlp.run("started", at_s=now_s(), resumed_from=3))
    until(lambda: cleared(job) == [("run-failed", "run")])
    assert job.all("audit", "entries")[0]["outcome"] == "cleared: the run was resumed"
    later(86_500)
    until(lambda: not raised(job))
    assert job.all("audit", "entries")[0]["outcome"] == "cleared: the run failed a day ago"


def test_a_run_that_resumes_during_an_evaluation_is_named_so(alerted, otlp, now_s, monkeypatch):
    job = alerted(rule("run_failed", None))
    job.send(otlp.run("failed", at_s=now_s(), error="OutOfMemoryError"))
    until(lambda: raised(job))
    read = Store.unfinished_runs

    def resume_after(store, **query):
        runs = read(store, **query)
        monkeypatch.undo()
        job.send(otlp.run("started", at_s=now_s(), resumed_from=3))
        return runs

    monkeypatch.setattr(Store, "unfinished_runs", resume_after)
    until(lambda: not raised(job))
    assert job.all("audit", "entries")[0]["outcome"] == "cleared: the run was resumed"


@pytest.mark.parametrize("end", ["finished", "stopped", "failed"])
def test_an_ended_run_raises_nothing(alerted, otlp, later, now_s, end):
    rules = [rule("telemetry_lost", 600), rule("staleness", 1), rule("blocked", 600)]
    job = alerted(rule("no_step", 600), *rules, silent_after_s=2_000)
    wait = {"wait": "w", "task": "train", "samples": 4}
    start_run(job, otlp, now_s)
    job.send(otlp.log("waiting", at_s=now_s(), **wait))
    start_run(job, otlp, now_s, "other")
    job.send(otlp.run(end, at_s=now_s() + 1), otlp.curve([5.0], name="rl.staleness.mean"))
    later(700)
    until(lambda: len(raised(job)) == 2)
    assert {run for _, run in raised(job)} == {"other"}


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ("finished", "the run finished"),
        ("failed", "the run failed"),
        ("silent", "the run was silent for a day"),
        ("without a start", "the run is silent and reported no start"),
        ("beyond 100", "100 other unfinished runs reported later"),
    ],
)
def test_the_end_of_a_run_clears_its_alerts(alerted, otlp, later, now_s, end, reason):
    job = alerted(rule("no_step", 600, for_s=0), silent_after_s=2_000)
    if end == "without a start":
        job.send(otlp.trace())
    else:
        start_run(job, otlp, now_s)
    later(700)
    until(lambda: raised(job))
    if end == "beyond 100":
        job.send(*[otlp.run("started", f"{number}", at_s=now_s()) for number in range(100)])
    elif end in ("finished", "failed"):
        job.send(otlp.run(end, at_s=now_s()))
    else:
        later(86_400 if end == "silent" else 2_000)
    until(lambda: not raised(job))
    assert job.all("audit", "entries")[0]["outcome"] == f"cleared: {reason}"


def test_a_slow_run_is_late_after_three_of_its_longest_steps(alerted, otlp, later, now_s):
    job = alerted(rule("no_step", 600))
    start_run(job, otlp, now_s)
    job.send(otlp.trace(step=0, seconds=1_000))
    later(2_000)
    evaluate(job)
    assert raised(job) == []
    later(1_100)
    until(lambda: raised(job) == [("no-step", "run")])


def test_a_blocked_task_is_raised_and_cleared_by_its_claim(alerted, otlp, later, now_s):
    job = alerted(rule("blocked", 600))
    wait = {"wait": "w", "task": "train", "fields": ["x"]}
    start_run(job, otlp, now_s)
    job.send(
        otlp.log("registered", at_s=now_s(), samples=4, tasks=["train"], fields=["x"]),
        otlp.log("waiting", at_s=now_s(), samples=4, **wait),
    )
    evaluate(job)
    assert raised(job) == []
    later(700)
    [alert] = until(lambda: job.get("alerts")["raised"])
    assert (alert["name"], alert["run_id"]) == ("blocked", "run")
    assert alert["value"] >= 700
    assert "train" in alert["sentence"]
    job.send(otlp.log("claimed", ["a"], at_s=now_s(), **wait))
    until(lambda: cleared(job) == [("blocked", "run")])


def test_silence_does_not_clear_a_blocked_task(alerted, otlp, later, now_s):
    wait = {"wait": "w", "task": "train", "fields": ["x"], "report_every_s": 30}
    rules = [rule("blocked", 60), rule("telemetry_lost", 600)]
    first = alerted(*rules)
    start_run(first, otlp, now_s)
    first.send(otlp.log("waiting", at_s=now_s(), samples=4, **wait))
    later(100)
    until(lambda: raised(first) == [("blocked", "run")])
    first.__exit__(None, None, None)
    later(1_000)
    second = alerted(*rules)  # the service did not run, so the process was not silent
    evaluate(second)
    assert (raised(second), second.get("why")[0]["silent_s"]) == ([("blocked", "run")], None)
    later(700)
    until(lambda: set(raised(second)) == {("blocked", "run"), ("telemetry-lost", "run")})
    assert second.get("why")[0]["silent_s"] > 1_000
    second.send(otlp.log("claimed", ["a"], at_s=now_s(), **wait))
    until(lambda: not raised(second))


def test_plane_that_answers_no_clients_is_raised_with_the_cause(alerted, otlp, later):
    with InMemoryDataPlaneClient({"enabled": True, "impl": "in_memory"}) as plane:
        plane.register_partition("train", ["x"], 2, ["t"])
        plane.put_samples(["a"], "train", TensorDict({"x": torch.zeros(1)}, [1]))
        inspector = plane.inspector
        job = alerted(rule("blocked", 600), inspector=inspector, poll_s=0.05, stuck_after_s=0.05)
        job.send(otlp.log("claimed", ["b"], task="t"))
        until(lambda: [wait["kind"] for wait in job.get("why")] == ["backlog"])
        inspector.fault = "its request thread ended"
        until(lambda: [wait["kind"] for wait in job.get("why")] == ["fault", "backlog"])
        later(700)
        [alert] = until(lambda: job.get("alerts")["raised"])
        assert "its request thread ended" in alert["sentence"]
        assert (alert["name"], alert["run_id"]) == ("blocked", "")
        inspector.fault = None
        until(lambda: cleared(job) == [("blocked", "")])


def test_a_collapsed_reward_is_raised_and_cleared(alerted, otlp):
    job = alerted(rule("reward_collapsed", 0.5))
    # A long run: its last ten steps count, not ten means of many steps.
    job.send(otlp.curve([min(1.0, step / 40) for step in range(10_000)]))
    evaluate(job)
    assert raised(job) == []
    job.send(otlp.curve([0.1] * 10, first=10_000))
    [alert] = until(lambda: job.get("alerts")["raised"])
    assert alert["value"] == pytest.approx(0.9)
    assert alert["sentence"] == "the mean reward fell from 1 to 0.1"
    job.send(otlp.curve([0.9] * 10, first=10_010))
    until(lambda: cleared(job) == [("reward-collapsed", "run")])


@pytest.mark.parametrize(
    ("rewards", "value"),
    [
        ([*[-2.0] * 10, *[-1.0] * 10, *[-1.9] * 10], 0.9),
        ([*[-1.0] * 10, *[0.0] * 10, *[-0.75] * 10], 0.75),
        ([*[-5.0] * 10, *[0.01] * 10, *[-4.0] * 10], 0.8),
        ([*[-5.0] * 10, *[0.01] * 10, *[-0.5] * 10], None),
        ([*[-10.0] * 10, *[-10.5] * 10, *[-11.0] * 10], None),
    ],
)
def test_a_reward_collapses_by_its_range_or_its_size(alerted, otlp, rewards, value):
    job = alerted(rule("reward_collapsed", 0.5))
    job.send(otlp.curve(rewards))
    evaluate(job)
    values = [alert["value"] for alert in job.get("alerts")["raised"]]
    assert values == ([] if value is None else [pytest.approx(value, abs=0.01)])


def test_rules_without_a_reported_metric_are_listed(alerted, otlp, now_s):
    job = alerted(
        rule("metric", None, metric="rl.entropy", below=0.1),
        rule("reward_collapsed", 0.5),
        {**rule("staleness", 4), "runs": "other"},
        rule("no_step", 1e6),
    )
    evaluate(job)
    assert job.get("alerts")["idle_rules"] == [], "there is no run"
    start_run(job, otlp, now_s)
    evaluate(job)
    assert job.get("alerts")["idle_rules"] == ["metric", "reward-collapsed"]
    sentence = "No run reports the metric of metric, reward-collapsed."
    assert sentence in job.client.get("/alerts").text
    job.send(otlp.curve([1.0]))
    job.send(otlp.curve([1.0], name="rl.entropy"))
    evaluate(job)
    assert job.get("alerts")["idle_rules"] == []


def test_a_rule_may_have_a_trainers_own_name_of_a_metric(alerted, otlp):
    job = alerted(rule("metric", None, metric="actor/lr@head", above=0.5))
    job.send(otlp.curve([1.0], name="actor/lr_head"))
    until(lambda: raised(job) == [("metric", "run")])


def test_labelled_curves_do_not_hide_the_reward_of_a_run(alerted, otlp):
    job = alerted(rule("reward_collapsed", 0.5))
    for number in range(20):
        job.send(otlp.curve([1.0] * 30, **{"rl.component": f"part {number}"}))
    job.send(otlp.curve([1.0] * 20 + [0.1] * 10))
    until(lambda: raised(job) == [("reward-collapsed", "run")])


def test_a_noisy_reward_has_not_collapsed(alerted, otlp):
    job = alerted(rule("reward_collapsed", 0.5))
    job.send(otlp.curve([(step * 7919 % 11) / 50 - 0.1 for step in range(200)]))
    evaluate(job)
    assert raised(job) == []


def test_lost_telemetry_is_raised_and_cleared_by_any_record(alerted, otlp, later, now_s):
    job = alerted(rule("telemetry_lost", 600))
    start_run(job, otlp, now_s)
    job.send(otlp.trace(run="without events", step=0))
    later(700)
    until(lambda: raised(job))
    # A run without a reported start raises nothing, since it may be finished.
    assert raised(job) == [("telemetry-lost", "run")]
    job.send(otlp.gauge())
    until(lambda: cleared(job) == [("telemetry-lost", "run")])


def test_dropped_telemetry_is_raised_until_the_run_restarts(alerted, otlp, now_s):
    job = alerted(rule("telemetry_dropped", 0))
    start_run(job, otlp, now_s)
    start_run(job, otlp, now_s, "other")
    job.send(otlp.dropped({"spans": 0, "events": 0}))
    evaluate(job)
    assert raised(job) == []
    job.send(otlp.dropped({"spans": 7, "events": 2, "steps": 0}))
    [alert] = until(lambda: job.get("alerts")["raised"])
    assert (alert["name"], alert["run_id"], alert["value"]) == ("telemetry-dropped", "run", 9)
    assert alert["sentence"] == "its processes dropped 2 events, 7 spans"
    job.send(otlp.run("started", at_s=now_s() + 1, resumed_from=3))  # by other processes
    until(lambda: cleared(job) == [("telemetry-dropped", "run")])
    outcome = job.all("audit", "entries")[0]["outcome"]
    assert outcome == "cleared: within the bound: its processes dropped nothing"


@pytest.mark.parametrize("kind", ["staleness", "logprob_gap"])
def test_a_metric_above_its_bound_is_raised_and_cleared(alerted, otlp, kind):
    job = alerted(rule(kind, 4.0))
    name = f"rl.{kind}.mean"
    job.send(otlp.curve([1.0, 5.0], name=name))
    [alert] = until(lambda: job.get("alerts")["raised"])
    assert (alert["kind"], alert["value"]) == (kind, 5.0)
    job.send(otlp.curve([3.9], name=name, first=2))
    evaluate(job)
    assert raised(job), "a value just below the bound does not clear it"
    job.send(otlp.curve([3.0], name=name, first=3))
    until(lambda: not raised(job))
    assert len(cleared(job)) == 1


@pytest.mark.parametrize(
    ("side", "values"), [("below", (2.0, -1.0, 0.51, 0.56)), ("above", (-2.0, 3.0, 0.49, 0.44))]
)
def test_any_metric_is_raised_and_cleared(alerted, otlp, side, values):
    job = alerted(
        rule("metric", None, metric="rl.reward.component", **{side: 0.5}),
        {"name": "of-one", "kind": "metric", "metric": "rl.reward.component{b}", side: 0.5},
    )
    for component, value in (("a", values[0]), ("b", values[1])):
        job.send(otlp.curve([value], name="rl.reward.component", **{"rl.component": component}))
    until(lambda: len(raised(job)) == 2)
    alerts = {alert["name"]: alert for alert in job.get("alerts")["raised"]}
    assert set(alerts) == {"metric", "of-one"}
    sentence = f"rl.reward.component{{b}} is {values[1]:g} at the newest step"
    assert alerts["metric"]["sentence"] == alerts["of-one"]["sentence"] == sentence
    assert (alerts["metric"]["subject"], alerts["metric"]["bound"]) == ("{b}", 0.5)
    assert "#learning" in job.client.get("/alerts").text
    for step, value in enumerate(values[2:], 1):
        assert len(raised(job)) == 2, "a value just within the bound does not clear it"
        named = {"name": "rl.reward.component", "rl.component": "b", "first": step}
        job.send(otlp.curve([value], **named))
        evaluate(job)
    assert sorted(cleared(job)) == [("metric", "run"), ("of-one", "run")]
    assert job.all("audit", "entries")[0]["outcome"].startswith("cleared: within the bound: ")


def test_a_value_that_is_not_finite_is_raised_and_cleared(alerted, otlp):
    job = alerted(rule("staleness", 4), rule("not_finite", None))
    for name in ("rl.loss", "rl.kl", "rl.staleness.mean"):
        job.send(otlp.curve([5.0, 6.0], name=name))
    until(lambda: raised(job) == [("staleness", "run")])
    for name, value in (("rl.kl", math.nan), ("rl.staleness.mean", math.nan)):
        job.send(otlp.curve([value], name=name, first=2))
    evaluate(job)
    assert raised(job) == [("staleness", "run")], "such a value is not below the bound"
    # OpenTelemetry's SDK of Python exports no such value, only the metric's name.
    job.send(otlp.curve([1.0], name="rl.not_finite", first=2, **{"rl.metric": "rl.loss"}))
    job.send(otlp.curve([0.5, math.inf], name="rl.grad_norm", first=1))
    until(lambda: ("not-finite", "run") in raised(job))
    until(lambda: job.get("alerts")["raised"][0]["value"] == 2)
    sentence = "rl.loss, rl.grad_norm are not finite at the newest step"
    assert sentence in [alert["sentence"] for alert in job.get("alerts")["raised"]]
    assert job.client.get("/run?run=run").text.count(">NaN</output>") == 4
    assert re.search(">NaN</a><svg[^>]*Loss over", job.client.get("/").text)
    for name in ("rl.loss", "rl.grad_norm"):
        job.send(otlp.curve([0.5], name=name, first=3))
    until(lambda: cleared(job) == [("not-finite", "run")])


def test_a_resume_clears_alerts_of_repeated_steps(alerted, otlp, now_s):
    job = alerted(rule("staleness", 4), rule("reward_collapsed", 0.5))
    start_run(job, otlp, now_s)
    job.send(otlp.curve([1.0] * 30 + [0.1] * 10))
    job.send(otlp.curve([1.0, 5.0], name="rl.staleness.mean", first=38))
    until(lambda: len(raised(job)) == 2)
    job.send(otlp.run("started", at_s=now_s(), resumed_from=30))
    at_s = now_s()
    job.send(otlp.curve([1.0] * 10, first=30, at_s=at_s))
    job.send(otlp.curve([1.0], name="rl.staleness.mean", first=30, at_s=at_s))
    until(lambda: not raised(job))


def test_a_condition_must_last(alerted, otlp, later):
    job = alerted(rule("staleness", 4, for_s=1_000), silent_after_s=1e6)
    job.send(otlp.curve([9.0], name="rl.staleness.mean"))
    evaluate(job)
    assert raised(job) == []
    job.send(otlp.curve([1.0], name="rl.staleness.mean", first=1))
    evaluate(job)
    later(900)
    job.send(otlp.curve([9.0], name="rl.staleness.mean", first=2))
    evaluate(job)
    later(900)
    evaluate(job)
    assert raised(job) == [], "the time starts anew after a value within the bound"
    later(200)
    until(lambda: raised(job) == [("staleness", "run")])


def test_a_condition_starts_anew_after_failed_evaluations(alerted, otlp, later, monkeypatch):
    job = alerted(rule("store_full", 0.999), rule("staleness", 4, for_s=1_000), silent_after_s=1e6)
    job.send(otlp.curve([9.0], name="rl.staleness.mean"))
    evaluate(job)
    with monkeypatch.context() as failing:
        failing.setattr(shutil, "disk_usage", lambda _: None)
        # The first evaluation that fails may have begun before the change of its clock or disk.
        until(lambda: job.get("alerts")["failed_evaluations"] > 1)
        now = time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: now() + 900)
        later(900)
        failed = job.get("alerts")["failed_evaluations"]
        until(lambda: job.get("alerts")["failed_evaluations"] > failed + 1)
    evaluate(job)
    later(900)
    evaluate(job)
    assert raised(job) == []
    later(200)
    until(lambda: raised(job) == [("staleness", "run")])


def test_a_rule_selects_runs_by_pattern(alerted, otlp):
    job = alerted(rule("staleness", 4, runs="prod-*"))
    for run in ("test-1", "prod-1"):
        job.send(otlp.curve([9.0], run=run, name="rl.staleness.mean"))
    until(lambda: raised(job))
    evaluate(job)
    assert raised(job) == [("staleness", "prod-1")]


def test_a_removed_rule_clears_its_alert(alerted, otlp):
    job = alerted(rule("staleness", 4))
    job.send(otlp.curve([9.0], name="rl.staleness.mean"))
    until(lambda: raised(job))
    job.__exit__(None, None, None)
    later_job = alerted(rule("logprob_gap", 1))
    later_job.send(otlp.curve([9.0], name="rl.staleness.mean"))
    until(lambda: cleared(later_job) == [("staleness", "run")])


def test_the_built_in_rules_apply_without_a_file(job_of, otlp, later, now_s):
    job = job_of(alerts_every_s=0.02)
    assert job.get("alerts")["rules"] == 10
    assert job.get("alerts")["webhooks"] == []
    start_run(job, otlp, now_s)
    later(2_000)
    until(lambda: sorted(raised(job)) == [("no-step", "run"), ("telemetry-lost", "run")])


def test_alerts_on_pages_and_in_metrics_are_escaped(alerted, otlp):
    job = alerted(
        rule("staleness", 4, severity="critical"), rule("logprob_gap", 1, severity="warning")
    )
    assert "No alert is raised." in job.client.get("/alerts").text
    for name in ("rl.logprob_gap.mean", "rl.staleness.mean"):
        job.send(otlp.curve([9.0], run=HOSTILE, name=name))
    until(lambda: len(raised(job)) == 2)
    assert [name for name, _ in raised(job)] == ["staleness", "logprob-gap"]
    for path in ("/", "/alerts", "/audit"):
        page = job.client.get(path).text
        assert HOSTILE not in page
        assert "&lt;img src=x onerror" in page
        assert '<span class="alert-count critical">2<' in page
    overview = job.client.get("/").text
    assert "Critical alert, first of 2: staleness" in overview
    assert "Warning alert" not in overview
    metrics = job.client.get("/metrics").text
    assert (
        f'dataplane_admin_alerts{{name="staleness",run="{HOSTILE}",severity="critical"}} 1.0'
        in (metrics)
    )


def test_an_evaluation_that_fails_is_counted_and_repeated(alerted, otlp, monkeypatch):
    job = alerted(rule("store_full", 0.9), rule("staleness", 4))

    def fail(_path):
        raise OSError("no such disk")

    monkeypatch.setattr(shutil, "disk_usage", fail)
    job.send(otlp.curve([9.0], name="rl.staleness.mean"))
    until(lambda: job.get("alerts")["failed_evaluations"] > 1)
    assert "dataplane_admin_alert_evaluation_failures_total" in job.client.get("/metrics").text
    monkeypatch.undo()
    until(lambda: raised(job) == [("staleness", "run")])
