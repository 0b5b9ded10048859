"""Runs have a state, a configuration, numbers and tags, from events in any order."""

import json

import pytest

HOSTILE = "<img src=x onerror=alert(1)>\0'\""


def run_of(job, run="run"):
    return job.get("run", run=run)


def states(job):
    return {run["run_id"]: run["state"] for run in job.get("runs")["runs"]}


def test_a_run_without_events_is_running_until_it_is_silent(job, otlp, later):
    job.send(otlp.trace(step=0))
    assert states(job) == {"run": "running"}
    later(299)
    assert states(job) == {"run": "running"}
    later(2)
    assert states(job) == {"run": "silent"}


def test_metrics_of_its_processes_keep_a_run_from_being_silent(job, otlp, later):
    job.send(otlp.run("started"), otlp.run("started", "other"))
    later(200)
    job.send(otlp.gauge())
    later(200)
    assert states(job) == {"run": "running", "other": "silent"}


def test_metrics_alone_make_no_run(job, otlp):
    job.send(otlp.gauge(run="a service"))
    assert states(job) == {}


@pytest.mark.parametrize("state", ["finished", "stopped"])
def test_an_ended_run_stays_ended(job, otlp, later, state):
    job.send(otlp.run("started"), otlp.run(state, at_s=9, reason="ignored"))
    later(10_000)
    assert (run_of(job)["state"], run_of(job)["error"], run_of(job)["seconds"]) == (
        state,
        "",
        9.0,
    )


def test_a_failed_run_has_its_error_until_it_is_resumed(job, otlp):
    job.send(otlp.run("started", config={"lr": "1", "steps": 5}))
    job.send(otlp.run("failed", at_s=9, error="WorkerError", reason="policy worker 1 died"))
    failed = run_of(job)
    assert (failed["state"], failed["error"]) == ("failed", "WorkerError: policy worker 1 died")
    assert (failed["resumed_from"], failed["config"]) == (None, {"lr": "1", "steps": "5"})
    job.send(otlp.run("started", at_s=20, resumed_from=40, config={"lr": "2"}))
    resumed = run_of(job)
    assert (resumed["state"], resumed["error"]) == ("running", "")
    assert (resumed["resumed_from"], resumed["config"]) == (40, {"lr": "2"})
    job.send(otlp.curve([0.25, 0.5]), otlp.run("started", at_s=30))  # of another process
    assert run_of(job)["steps"] == 2
    job.send(otlp.run("stopped", at_s=40), otlp.run("started", at_s=50))
    restarted = run_of(job)
    assert (restarted["state"], restarted["steps"]) == ("running", 0)
    assert restarted["resumed_from"] == 0


def test_events_count_in_the_order_of_their_times(job, otlp):
    events = [
        otlp.run("started", config={"lr": "1"}),
        otlp.run("failed", at_s=9, error="OSError"),
        otlp.run("started", at_s=20, resumed_from=4, config={"lr": "2"}),
        otlp.run("finished", at_s=30),
    ]
    for event in [*reversed(events), *events]:
        job.send(event)
    run = run_of(job)
    assert (run["state"], run["error"], run["config"]) == ("finished", "", {"lr": "2"})
    assert (run["resumed_from"], run["seconds"]) == (4, 30.0)


def test_a_run_has_the_steps_and_the_last_reward_of_its_metrics(job, otlp):
    job.send(
        otlp.curve([0.25, 0.5, 0.75]),
        otlp.curve([1.0] * 4, name="rl.time"),  # a validation after the last step has a time
        otlp.curve([9.0] * 2, **{"rl.component": "format"}),
    )
    job.send(otlp.trace(run="traced", step=0), otlp.trace(run="traced", step=1))
    numbers = {run["run_id"]: (run["steps"], run["reward"]) for run in job.get("runs")["runs"]}
    assert numbers == {"run": (3, 0.75), "traced": (2, None)}


def test_an_unknown_run_does_not_exist(job):
    for path in ("run", "runs/compare", "runs/curves"):
        answer = job.client.get(f"/api/v1/{path}", params={"run": "no such run"})
        assert answer.status_code == 404
        assert "'no such run'" in answer.json()["detail"]


def test_hostile_events_stay_text_in_bounded_size(job, otlp):
    config = {f"{HOSTILE}{number:04}": HOSTILE * 100 for number in range(1100)}
    job.send(otlp.run("started", HOSTILE.replace("\0", ""), config=config))
    job.send(otlp.run("failed", HOSTILE.replace("\0", ""), at_s=1, error=HOSTILE, reason="x" * 900))
    run = run_of(job, HOSTILE.replace("\0", ""))
    assert len(run["config"]) == 1000
    assert {len(value) for value in run["config"].values()} == {500}
    assert len(run["error"]) == 500


@pytest.mark.parametrize("config", ["text", 7, True, ["a"], {"a": {"b": ["c"]}}, {"": ""}])
def test_a_configuration_of_any_form_is_accepted(job, otlp, config):
    job.send(otlp.run("started", config=config, resumed_from="text"))
    expected = {
        key: value if isinstance(value, str) else json.dumps(value)
        for key, value in (config.items() if isinstance(config, dict) else ())
    }
    assert (run_of(job)["config"], run_of(job)["resumed_from"]) == (expected, None)


@pytest.fixture
def several(job, otlp, later):
    """Send four runs with different rewards, durations and states."""
    for run, (seconds, reward, steps) in {
        "a/1": (10, 0.5, 3),
        "a/2": (30, 0.9, 1),
        "b/1": (20, None, 2),
    }.items():
        job.send(otlp.run("started", run, at_s=-seconds), otlp.run("finished", run))
        name = "rl.loss" if reward is None else "rl.reward.mean"
        job.send(otlp.curve([reward or 1.0] * steps, run=run, name=name))
        later(1)
    job.send(otlp.run("failed", "b/2", error="OSError", reason="disk full"))
    for run, tags in {"a/1": ["good"], "b/1": ["good", "old"]}.items():
        job.app.state.store.tag_run(run, tags)
    return job


@pytest.mark.parametrize(
    ("query", "runs"),
    [
        ({}, ["b/2", "b/1", "a/2", "a/1"]),
        ({"ascending": True}, ["a/1", "a/2", "b/1", "b/2"]),
        ({"q": "A/"}, ["a/2", "a/1"]),
        ({"q": "disk"}, ["b/2"]),
        ({"q": "old"}, ["b/1"]),
        ({"state": "failed"}, ["b/2"]),
        ({"tag": "good"}, ["b/1", "a/1"]),
        ({"tag": "goo"}, []),
        ({"tag": "good", "q": "a", "state": "finished"}, ["a/1"]),
        ({"sort": "duration"}, ["a/2", "b/1", "a/1", "b/2"]),
        ({"sort": "steps", "limit": 3}, ["a/1", "b/1", "a/2"]),
        ({"sort": "started", "ascending": True}, ["a/2", "b/1", "a/1", "b/2"]),
        ({"sort": "reward"}, ["a/2", "a/1", "b/2", "b/1"]),
        ({"sort": "reward", "ascending": True}, ["a/1", "a/2", "b/2", "b/1"]),
    ],
)
def test_runs_are_filtered_and_sorted(several, query, runs):
    answer = several.get("runs", **query)
    assert [run["run_id"] for run in answer["runs"]] == runs
    assert (answer["total"], answer["tags"]) == (4, ["good", "old"])


def test_configurations_are_compared_by_key(job, otlp):
    job.send(
        otlp.run("started", "a", config={"lr": "1", "seed": "0", "model": "m"}),
        otlp.run("started", "b", config={"lr": "2", "seed": "0"}),
        otlp.run("started", "c"),
    )
    of_two = job.get("runs/compare", run=["a", "b"])
    assert [run["run_id"] for run in of_two["runs"]] == ["a", "b"]
    assert of_two["differences"] == [
        {"key": "lr", "values": ["1", "2"]},
        {"key": "model", "values": ["m", None]},
    ]
    assert of_two["equal"] == 1
    with_unknown = job.get("runs/compare", run=["a", "c", "b"])["differences"]
    assert with_unknown[0] == {"key": "lr", "values": ["1", None, "2"]}
    assert [row["key"] for row in with_unknown] == ["lr", "model"]


@pytest.mark.parametrize("count", [0, 9])
def test_a_bounded_number_of_runs_is_compared(job, count):
    runs = [f"run {number}" for number in range(count)]
    for path in ("compare", "curves"):
        answer = job.client.get(f"/api/v1/runs/{path}", params={"run": runs})
        assert answer.status_code == 422


def compared(job, **query):
    answer = job.get("runs/curves", run=["a", "b"], **query)
    return {
        (answer["runs"][curve["run"]], curve["name"]): list(
            zip(curve["x"], curve["values"], strict=True)
        )
        for curve in answer["curves"]
    }


@pytest.fixture
def two(job, otlp):
    """Send two runs: one takes 10 s and 8 samples a step, the other 20 s and no known samples."""
    for run, step_s in (("a", 10), ("b", 20)):
        job.send(otlp.run("started", run, at_s=0))
        times = [otlp.start_ns / 1e9 + step_s * (step + 1) for step in range(4)]
        job.send(otlp.curve(times, run=run, name="rl.time", unit="s"))
        job.send(otlp.curve([0.0, 1.0, 2.0, 3.0], run=run))
    job.send(otlp.curve([8.0, 16.0, 24.0, 32.0], run="a", name="rl.samples"))
    return job


def test_curves_are_compared_by_step_time_and_samples(two):
    name = {"name": "rl.reward.mean"}
    by_step = [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert compared(two, **name) == {
        ("a", "rl.reward.mean"): by_step,
        ("b", "rl.reward.mean"): by_step,
    }
    by_time = compared(two, axis="time", **name)
    assert by_time["a", "rl.reward.mean"] == [(10, 0), (20, 1), (30, 2), (40, 3)]
    assert by_time["b", "rl.reward.mean"] == [(20, 0), (40, 1), (60, 2), (80, 3)]
    by_samples = compared(two, axis="samples", **name)
    assert by_samples == {("a", "rl.reward.mean"): [(8, 0), (16, 1), (24, 2), (32, 3)]}
    assert two.get("runs/curves", run=["a", "b"], axis="samples")["without_axis"] == ["b"]


def test_a_range_of_the_axis_has_a_point_beyond_each_end(two):
    name = {"name": "rl.reward.mean"}
    assert [x for x, _ in compared(two, first=1, last=2, **name)["a", "rl.reward.mean"]] == [1, 2]
    by_time = compared(two, axis="time", first=19, last=31, **name)
    assert [x for x, _ in by_time["a", "rl.reward.mean"]] == [10, 20, 30, 40]
    assert [x for x, _ in by_time["b", "rl.reward.mean"]] == [20, 40]
    between = compared(two, axis="time", first=22, last=28, **name)
    assert [x for x, _ in between["a", "rl.reward.mean"]] == [20, 30]
    assert compared(two, axis="time", first=500, **name) == {
        ("a", "rl.reward.mean"): [],
        ("b", "rl.reward.mean"): [],
    }


def test_reduced_and_sparse_curves_have_the_same_axis(job, otlp):
    """One has a point for each bucket of steps, the other for each validation."""
    job.send(otlp.run("started", "a"), otlp.run("started", "b"))
    start_s = otlp.start_ns / 1e9
    job.send(otlp.curve([start_s + step for step in range(2000)], run="a", name="rl.time"))
    job.send(otlp.curve([start_s] * 9, run="a", name="rl.time", **{"rl.component": "x"}))
    job.send(otlp.curve([float(step) for step in range(2000)], run="a"))
    job.send(otlp.curve([1000.0], first=1000, run="a", name="rl.validation.reward"))
    by_time = compared(job, axis="time", max_points=25)
    assert by_time["a", "rl.validation.reward"] == [(999, 1000)]
    for x, value in by_time["a", "rl.reward.mean"]:
        assert x == pytest.approx(value, abs=0.51)


def test_points_without_a_known_place_are_left_out(job, otlp):
    job.send(otlp.run("started", "a"), otlp.run("started", "b"))
    job.send(otlp.curve([float(step) for step in range(6)], run="a"))
    job.send(otlp.curve([8.0, None, 24.0], first=1, run="a", name="rl.samples"))
    job.send(otlp.curve([0.5, None, 0.6, 0.7, 0.8], run="a", name="rl.validation.reward"))
    by_samples = compared(job, axis="samples")
    assert by_samples["a", "rl.reward.mean"] == [(8, 1), (24, 3)]
    # A validation is that of the weights after the step before it.
    assert by_samples["a", "rl.validation.reward"] == [(0, 0.5), (8, 0.6), (24, 0.8)]


def test_long_names_with_one_beginning_stay_apart(job, otlp):
    names = ["n" * 5_000 + end for end in "ab"]
    for name in names:
        job.send(otlp.curve([1.0], run=name[4_000:], name=name, **{"rl.component": name}))
    runs = [run["run_id"] for run in job.get("runs")["runs"]]
    assert len(set(runs)) == 2
    for name in names:
        [curve] = job.get("runs/curves", run=name[4_000:])["curves"]
        assert len(curve["name"]) == 500
    [first, second] = [job.get("runs/curves", run=run)["curves"][0] for run in runs]
    assert first["name"] != second["name"]
    assert first["attributes"] != second["attributes"]
