"""Metrics with a step are stored by run, name, attributes and step, and read in bounded size."""

import math
import os
import time

import pytest
from sqlalchemy import Engine, create_engine, event, text
from structlog.testing import capture_logs

from dataplane_admin import Retention

DAY = 86_400 * 10**9


def curves(job, run="run", **query):
    return {
        (curve["name"], *curve["attributes"].values()): curve
        for curve in job.get("runs/curves", run=run, **query)["curves"]
    }


def test_points_are_stored_by_step_in_any_order(job, otlp):
    job.send(otlp.curve([3.0, 4.0], first=3))
    job.send(otlp.curve([0.0, None, 2.0]))
    [curve] = curves(job).values()
    assert (curve["unit"], curve["attributes"]) == ("1", {})
    assert (curve["steps"], curve["values"]) == ([0, 2, 3, 4], [0.0, 2.0, 3.0, 4.0])
    assert (curve["points"], curve["first_step"], curve["last_step"]) == (4, 0, 4)
    assert (curve["last_value"], curve["width"], curve["low"]) == (4.0, 1, [])


def test_a_value_reported_as_not_finite_is_in_its_curve(job, otlp):
    job.send(otlp.curve([3.0, 4.0], name="rl.kl", unit="{nat}"))
    for component in ("a", "b"):
        named = {"rl.component": component, "name": "rl.reward.component"}
        job.send(otlp.curve([0.5], **named))
    reported = {"name": "rl.not_finite", "first": 2}
    job.send(otlp.curve([1.0], **reported, **{"rl.metric": "rl.kl"}))
    component = {"rl.metric": "rl.reward.component", "rl.component": "b"}
    job.send(otlp.curve([1.0], **reported, **component))
    stored = curves(job)
    kl, part = stored["rl.kl",], stored["rl.reward.component", "b"]
    assert (kl["unit"], kl["steps"], kl["values"]) == ("{nat}", [0, 1, 2], [3.0, 4.0, None])
    assert (part["steps"], part["last_value"]) == ([0, 2], None)
    assert stored.keys() == {
        ("rl.kl",),
        ("rl.reward.component", "a"),
        ("rl.reward.component", "b"),
    }


def test_long_names_with_the_same_beginning_stay_different(job, otlp):
    runs, names = (["r" * 600 + end for end in "ab"], ["n" * 600 + end for end in "ab"])
    for run in runs:
        for name in names:
            job.send(otlp.curve([len(run) + 0.0], run=run, name=name))
        stored = curves(job, run=run)
        assert len(stored) == 2
        assert {curve["points"] for curve in stored.values()} == {1}
    assert len({run["run_id"] for run in job.get("runs")["runs"]}) == 2


def test_a_step_that_ran_again_replaces_its_point(job, otlp):
    job.send(otlp.curve([0.0, 1.0, 2.0, 3.0]))
    job.send(otlp.curve([20.0], first=2))
    [curve] = curves(job).values()
    assert (curve["values"], curve["points"]) == ([0.0, 1.0, 20.0, 3.0], 4)
    assert curve["last_value"] == 3.0


@pytest.mark.parametrize(("late", "at"), [(False, 40), (True, 40), (False, 32), (True, 48)])
def test_a_resume_drops_the_points_of_repeated_steps(job, otlp, late, at):
    now_s = otlp.start_ns / 1e9
    job.send(
        otlp.curve([float(step) for step in range(60)]),
        otlp.curve([now_s + step for step in range(60)], name="rl.time"),
        otlp.curve([0.5] * 2, name="rl.validation.reward", first=50),
        otlp.run("started", "other", resumed_from=0),
    )
    resume = otlp.run("started", at_s=100, resumed_from=at)
    replayed = (
        otlp.curve([-1.0, -2.0], first=at, at_s=101),
        otlp.curve([now_s + 101] * 2, name="rl.time", first=at, at_s=101),
    )
    earlier = otlp.curve([9.0] * 60, first=at, at_s=99)  # exported late
    requests = [*replayed, resume] if late else [resume, *replayed, earlier]
    for request in [*requests, resume]:
        job.send(request)
    known = curves(job)
    assert set(known) == {("rl.reward.mean",), ("rl.time",)}
    reward = known["rl.reward.mean",]
    assert reward["values"] == [*map(float, range(at)), -1.0, -2.0]
    assert (reward["points"], reward["last_step"], reward["last_value"]) == (at + 2, at + 1, -2.0)
    assert curves(job, max_points=2)["rl.reward.mean",]["low"] == [0.0, -2.0]
    [run] = [run for run in job.get("runs")["runs"] if run["run_id"] == "run"]
    assert (run["steps"], run["reward"]) == (at + 2, -2.0)


@pytest.mark.parametrize("name", ["rl.validation.pass_rate", "eval_loss", "eval/x", "val-core/x"])
@pytest.mark.parametrize("order", ["in order", "late", "at once"])
def test_a_resume_retains_the_validation_of_its_checkpoint(job, otlp, name, order):
    """A validation after N steps and the resume from their checkpoint both have the step N."""
    now_s = otlp.start_ns / 1e9
    validations = [
        each
        for step, value in ((20, 0.2), (40, 0.4), (60, 0.6))
        for each in (
            otlp.curve([value], name=name, first=step, at_s=step),
            otlp.curve([now_s + step], name="rl.time", first=step, at_s=step),
        )
    ]
    resumes = [
        otlp.run("started", at_s=30, resumed_from=20),
        otlp.run("started", at_s=70, resumed_from=40),
    ]
    job.send(otlp.curve([1.0] * 60), otlp.curve([now_s] * 60, name="rl.time"))
    if order == "late":
        requests = [*resumes, *validations]
    elif order == "at once":
        [_, second] = resumes
        resumes[0].MergeFrom(second)
        requests = [*validations, resumes[0]]
    else:
        requests = [*validations[:2], resumes[0], *validations[2:], resumes[1]]
    for request in requests:
        job.send(request)
    known = curves(job)
    assert known[name,]["values"] == [0.2, 0.4]
    assert known["rl.reward.mean",]["steps"] == [*range(20)]


def test_a_start_from_the_first_step_drops_its_validation(job, otlp):
    job.send(otlp.curve([0.5], name="rl.validation.reward"), otlp.run("failed", at_s=5))
    job.send(otlp.run("started", at_s=10))
    assert curves(job) == {}


def test_many_resumes_in_a_request_delete_each_curve_once(job, otlp):
    now_s = otlp.start_ns / 1e9
    job.send(
        otlp.curve([float(step) for step in range(60)]),
        otlp.curve([now_s + step for step in range(60)], name="rl.time"),
    )
    resumes = otlp.run("started", at_s=45, resumed_from=40)
    resumes.MergeFrom(otlp.run("started", at_s=12, resumed_from=10))
    for number in range(200):
        resumes.MergeFrom(otlp.run("started", at_s=5 + number / 1000, resumed_from=30))
    statements = []

    def keep(_connection, _cursor, statement, *_):
        statements.append(statement)

    event.listen(Engine, "before_cursor_execute", keep)
    try:
        job.send(resumes)
    finally:
        event.remove(Engine, "before_cursor_execute", keep)
    # The steps from 12 on ran after the first of both resumes, those from 45 on after the last.
    assert curves(job)["rl.reward.mean",]["steps"] == [*range(10), *range(12, 40), *range(45, 60)]
    assert sum(statement.startswith("DELETE FROM curve_points") for statement in statements) == 2
    assert sum(statement.startswith("UPDATE runs SET") for statement in statements) == 2


def test_a_resent_point_changes_nothing(job, otlp):
    for _ in range(3):
        job.send(otlp.curve([0.5, 1.0]))
    [curve] = curves(job).values()
    assert (curve["values"], curve["points"]) == ([0.5, 1.0], 2)


def test_attributes_names_and_runs_separate_curves(job, otlp):
    for component, value in (("format", 0.25), ("answer", 0.75)):
        named = {"name": "rl.reward.component", "rl.component": component}
        job.send(otlp.curve([value], **named))
    job.send(otlp.curve([0.5]), otlp.curve([0.125], run="other"))
    assert [(key, curve["values"]) for key, curve in curves(job).items()] == [
        (("rl.reward.component", "answer"), [0.75]),
        (("rl.reward.component", "format"), [0.25]),
        (("rl.reward.mean",), [0.5]),
    ]
    assert list(curves(job, name="rl.reward.mean")) == [("rl.reward.mean",)]
    assert curves(job, "other")["rl.reward.mean",]["values"] == [0.125]


def test_the_run_of_a_point_wins_over_that_of_its_process(job, otlp):
    job.send(otlp.curve([1.0], run="process", **{"rl.run_id": "point"}))
    assert list(curves(job, "point")) == [("rl.reward.mean",)]
    assert [run["run_id"] for run in job.get("runs")["runs"]] == ["point"]


def test_all_processes_share_the_curve_of_a_run(job, otlp):
    """The process changes with a resume."""
    for first, pid in ((0, 1), (1, 2)):
        data = otlp.curve([float(first)], first=first)
        otlp.set(data.resource_metrics[0].resource.attributes, {"process.pid": pid})
        job.send(data)
    [curve] = curves(job).values()
    assert curve["values"] == [0.0, 1.0]


@pytest.mark.parametrize("step", [-1, "text", 1.5, True])
def test_a_step_that_is_no_integer_makes_no_curve(job, otlp, step):
    data = otlp.curve([1.0])
    [metric] = data.resource_metrics[0].scope_metrics[0].metrics
    del metric.gauge.data_points[0].attributes[:]
    pair = metric.gauge.data_points[0].attributes.add(key="rl.step")
    kind = {bool: "bool_value", int: "int_value", float: "double_value", str: "string_value"}
    setattr(pair.value, kind[type(step)], step)
    job.send(data)
    assert job.get("runs")["runs"] == []


def test_the_largest_step_is_stored(job, otlp):
    job.send(otlp.curve([1.0], first=2**63 - 1))
    [curve] = curves(job).values()
    assert curve["steps"] == [2**63 - 1]


def test_a_value_that_is_not_finite_is_a_gap(job, otlp):
    unset = otlp.curve([0.0], first=3)
    [metric] = unset.resource_metrics[0].scope_metrics[0].metrics
    metric.gauge.data_points[0].flags = 1  # it has no value, see OTLP
    job.send(otlp.curve([1.0, math.nan, math.inf]), unset)
    [curve] = curves(job).values()
    assert (curve["values"], curve["last_value"], curve["points"]) == ([1.0, None, None], None, 3)


def test_the_series_of_a_curve_has_the_newest_value_only(job, otlp):
    job.send(otlp.curve([float(step) for step in range(100)]))
    [series] = job.get("series", name="rl.reward.mean")
    assert (series["value"], series["attributes"]) == (99.0, {})


@pytest.mark.parametrize(("points", "width"), [(500, 4), (125, 16), (25, 80)])
def test_a_long_curve_keeps_its_extremes_and_means(job, otlp, points, width):
    values = [math.sin(step / 50) for step in range(2000)]
    values[1234], values[1800] = 9.0, -9.0
    job.send(otlp.curve(values))
    [curve] = curves(job, max_points=points).values()
    assert (curve["width"], curve["steps"]) == (width, [*range(0, 2000, width)])
    assert (max(curve["high"]), min(curve["low"])) == (9.0, -9.0)
    assert curve["high"][1234 // width] == 9.0
    means = [sum(values[at : at + width]) / width for at in range(0, 2000, width)]
    assert curve["values"] == pytest.approx(means)


def test_a_replaced_point_changes_what_long_curves_show(job, otlp):
    job.send(otlp.curve([0.0] * 2000))
    job.send(otlp.curve([16.0], first=1600))
    job.send(otlp.curve([None, math.nan], first=1700))
    [curve] = curves(job, max_points=25).values()
    assert (curve["values"][20], curve["high"][20]) == (pytest.approx(0.2), 16.0)
    assert curve["values"][21] == 0.0


def test_a_range_of_steps_has_more_detail(job, otlp):
    job.send(otlp.curve([float(step) for step in range(2000)]))
    [curve] = curves(job, max_points=100, first=500, last=599).values()
    assert (curve["width"], curve["steps"]) == (1, [*range(500, 600)])


def test_a_sparse_curve_is_not_reduced(job, otlp):
    """A validation has few points in a long run."""
    job.send(otlp.curve([0.0] * 2000))
    for step in range(0, 2000, 500):
        job.send(otlp.curve([1.0], name="rl.validation.reward", first=step))
    assert curves(job, max_points=100)["rl.validation.reward",]["steps"] == [*range(0, 2000, 500)]


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", "a\0b", "größe 😀", "x" * 5000])
def test_hostile_names_and_attributes_stay_text(job, otlp, name):
    job.send(otlp.curve([1.0], name=name, **{"rl.component": name}))
    [curve] = curves(job).values()
    assert curve["values"] == [1.0]
    assert curve["attributes"]["rl.component"][:4] == name[:4]
    assert curves(job, name=curve["name"])


def test_a_run_and_an_answer_have_a_bounded_number_of_curves(job, otlp):
    run = os.urandom(8).hex()  # a run is logged once

    def send(*numbers):
        job.send(*(otlp.curve([1.0], run=run, name=f"m{number:04}") for number in range(*numbers)))

    send(990)
    with capture_logs() as logs:
        for _ in range(2):
            send(980, 1010)
    assert len(curves(job, run)) == 200
    assert len(curves(job, run, name="m0999")) == 1
    assert curves(job, run, name="m1000") == {}
    logged = [(log["run_id"], log["max_curves"]) for log in logs if "curves" in log["event"]]
    assert logged == [(run, 1_000)]


def test_too_many_points_are_refused(job):
    answer = job.client.get("/api/v1/runs/curves", params={"run": "run", "max_points": 5000})
    assert answer.status_code == 422


@pytest.mark.parametrize(
    ("limits", "retained"),
    [
        ({}, {"new"}),
        ({"max_run_age_s": 10 * 86_400.0}, {"new", "old"}),
        ({"max_run_age_s": math.inf}, {"new", "old", "oldest"}),
    ],
)
def test_old_curves_are_deleted_with_their_points(url, job_of, otlp, monkeypatch, limits, retained):
    job = job_of(store_url=url, retention=Retention(max_age_s=86_400.0, **limits))
    now_ns = time.time_ns()
    with monkeypatch.context() as then:
        for run, days in (("oldest", 20), ("old", 3)):
            then.setattr(time, "time_ns", lambda days=days: now_ns - days * DAY)
            job.send(otlp.curve([1.0] * 40, run=run), otlp.trace(run=run))
        job.send(otlp.curve([0.5], run="new", name="rl.validation.reward"))
    job.send(otlp.curve([1.0] * 40, run="new"))
    deadline = time.monotonic() + 20
    while (
        job.get("traces")["traces"]
        or {run["run_id"] for run in job.get("runs")["runs"]} != retained
    ):
        assert time.monotonic() < deadline
        job.send(otlp.curve([1.0], run="new"))
    for run in retained:
        assert curves(job, run)["rl.reward.mean",]["points"] == 40
    engine = create_engine(url)
    with engine.connect() as connection:
        for table, rows in (("curves", 1), ("curve_points", 40), ("curve_blocks", 3)):
            stored = connection.scalar(text(f"SELECT count(*) FROM {table}"))
            assert stored == rows * len(retained) + 1
    engine.dispose()


def test_a_full_store_deletes_curves_too(postgresql, job_of, otlp):
    """Check on PostgreSQL, whose size is the bytes of the records and not of a file."""
    job = job_of(store_url=postgresql.make(empty=False), retention=Retention(max_bytes=100_000))
    for run in range(6):
        job.send(otlp.curve([1.0] * 1000, run=f"run {run}"))
    deadline = time.monotonic() + 20
    # The run of the deleted curves may be deleted as well.
    while "run 0" in {run["run_id"] for run in job.get("runs")["runs"]} and curves(job, "run 0"):
        assert time.monotonic() < deadline
        job.send(otlp.curve([1.0], run="run 5"))
    assert curves(job, "run 5")
