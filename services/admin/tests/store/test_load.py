"""Load of engines and nodes: shares and rates over time, in bounded size and age."""

import time

import pytest
from loads import NS, cpu_times, engine, gauges, node
from sqlalchemy import create_engine, text

from dataplane_admin import Retention

HOSTILE = "<img src=x onerror=alert(1)>\0"


def now_s():
    return time.time_ns() // NS


def of(job, **query):
    """Return the values of each metric and device, by engine or node."""
    return {
        subject["name"]: {
            (series["metric"], *filter(None, [series["device"]])): series["values"]
            for series in subject["series"]
        }
        for subject in job.get("load", **query)["subjects"]
    }


def test_levels_are_values_and_counters_are_rates(job):
    start = now_s() - 60
    for step in range(4):
        job.send(engine(start + 5 * step, running=step, waiting=2, tokens=1000 * step, kv=0.25))
    shown = of(job)["node-1:8000"]
    assert shown["running",] == [0.0, 1.0, 2.0, 3.0]
    assert shown["waiting",] == [2.0] * 4
    assert shown["kv_cache",] == [0.25] * 4
    assert shown["generation_tokens",] == [200.0] * 3
    [subject] = job.get("load", start_ns=start * NS, end_ns=(start + 20) * NS)["subjects"]
    times = {series["metric"]: series["times_s"] for series in subject["series"]}
    assert times["running"] == [0, 5, 10, 15]
    assert times["generation_tokens"] == [2.5, 7.5, 12.5]


def test_hit_rate_is_the_share_of_queries_since_the_last_point(job):
    start = now_s() - 60
    for step, (hits, queries) in enumerate([(10, 100), (40, 140), (40, 140)]):
        job.send(engine(start + 5 * step, hits=hits, queries=queries))
    assert of(job)["node-1:8000"]["prefix_hits",] == [0.75, None]


def test_a_restarted_counter_leaves_a_gap(job):
    start = now_s() - 60
    for step, tokens in enumerate([1000, 2000, 100, 600]):
        job.send(engine(start + 5 * step, tokens=tokens))
    assert of(job)["node-1:8000"]["generation_tokens",] == [200.0, None, 100.0]


def test_a_silent_source_leaves_a_gap(job):
    start = now_s() - 600
    for second in (0, 5, 10, 300, 305):
        job.send(engine(start + second, running=1, tokens=second))
    shown = of(job)["node-1:8000"]
    assert shown["running",] == [1.0, 1.0, 1.0, None, 1.0, 1.0]
    assert shown["generation_tokens",] == [1.0, 1.0, None, 1.0]


def test_processors_and_memory_are_added_up(job):
    start = now_s() - 60
    for step in range(2):
        job.send(node(start + 10 * step, cpu_times(4, busy_s=4 * step, idle_s=6 * step)))
    memory = {"used": 3e9, "free": 2e9, "cached": 4e9, "buffered": 1e9, "slab_reclaimable": 5e9}
    job.send(node(start, memory=memory))
    assert of(job)["node-1"] == {("cpu",): [0.4], ("memory",): [0.3]}


def test_each_gpu_has_a_series(job):
    start = now_s() - 60
    gpus = [("hw.gpu.utilization", {"hw.id": str(gpu)}, gpu / 10) for gpu in range(11)]
    gpus += [("hw.gpu.memory.usage", {"hw.id": "0"}, 20e9)]
    gpus += [("hw.gpu.memory.limit", {"hw.id": "0"}, 80e9)]
    job.send(gauges({"host.name": "node-1"}, start, gpus))
    shown = of(job)["node-1"]
    utilization = [shown["gpu", str(gpu)] for gpu in range(11)]
    assert list(shown)[:11] == [("gpu", str(gpu)) for gpu in range(11)]
    assert utilization == [[gpu / 10] for gpu in range(11)]
    assert shown["gpu_memory", "0"] == [0.25]


def test_the_exporter_of_dcgm_names_the_node(job):
    labels = {"gpu": "3", "Hostname": "node-7", "modelName": "NVIDIA H100"}
    points = [
        ("DCGM_FI_DEV_GPU_UTIL", 40),
        ("DCGM_FI_DEV_FB_USED", 10),
        ("DCGM_FI_DEV_FB_FREE", 30),
    ]
    resource = {"service.name": "dcgm", "service.instance.id": "10.0.0.7:9400"}
    job.send(gauges(resource, now_s(), [(name, labels, value) for name, value in points]))
    assert of(job) == {"node-7": {("gpu", "3"): [0.4], ("gpu_memory", "3"): [0.25]}}


def test_sglang_is_an_engine(job):
    resource = {"service.name": "sglang", "service.instance.id": "node-1:30000"}
    points = [
        ("sglang:num_running_reqs", {"dp_rank": "0"}, 3),
        ("sglang:num_running_reqs", {"dp_rank": "1"}, 4),
        ("sglang:token_usage", {}, 0.5),
    ]
    job.send(gauges(resource, now_s(), points))
    shown = of(job)
    assert shown["node-1:30000"] == {("running",): [3.0], ("kv_cache",): [0.5]}
    assert shown["node-1:30000 engine 1"] == {("running",): [4.0]}


def test_sglang_requests_by_priority_or_stage_are_counted_once(job):
    resource = {"service.name": "sglang", "service.instance.id": "node-1:30000"}
    points = [
        ("sglang:num_running_reqs", {"pp_rank": "0", "priority": ""}, 5),
        ("sglang:num_running_reqs", {"pp_rank": "0", "priority": "0"}, 2),
        ("sglang:num_running_reqs", {"pp_rank": "0", "priority": "1"}, 3),
        ("sglang:num_running_reqs", {"pp_rank": "1", "priority": ""}, 5),
        ("sglang:num_queue_reqs", {"pp_rank": "0"}, 1),
        ("sglang:num_queue_reqs", {"pp_rank": "1"}, 1),
    ]
    job.send(gauges(resource, now_s(), points))
    assert of(job)["node-1:30000"] == {("running",): [5.0], ("waiting",): [1.0]}


def test_load_is_not_a_series_and_keeps_no_run_alive(job, otlp):
    job.send(otlp.gauge(run="run"), engine(now_s(), running=1, run="run"))
    assert [series["name"] for series in job.get("series")] == ["up"]
    job.send(engine(now_s(), running=1, run="other"))
    assert [run["run_id"] for run in job.get("runs")["runs"]] == []


def test_a_run_shows_its_engines_and_those_of_no_run(job):
    for name, run in (("a", "run"), ("b", "other"), ("c", "")):
        job.send(engine(now_s(), running=1, name=name, run=run))
    assert list(of(job)) == ["a", "b", "c"]
    assert list(of(job, run="run")) == ["a", "c"]


def test_a_resent_request_changes_nothing(job):
    start = now_s() - 60  # an old time might be dropped in between
    for _ in range(3):
        job.send(engine(start, running=2, tokens=5))
        job.send(engine(start + 5, running=2, tokens=10))
    shown = of(job)["node-1:8000"]
    assert (shown["running",], shown["generation_tokens",]) == ([2.0, 2.0], [1.0])


def test_a_long_period_is_reduced(job):
    start = now_s() - 3_000
    for first in range(0, 3_000, 500):
        job.send(*(engine(start + first + s, running=s % 2, tokens=s + first) for s in range(500)))
    shown = of(job, max_points=100)["node-1:8000"]
    assert 60 <= len(shown["running",]) <= 101
    assert all(abs(value - 0.5) < 0.05 for value in shown["running",][1:-1])
    assert set(shown["generation_tokens",]) == {1.0}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 1e30])
def test_an_impossible_value_is_not_stored(job, value):
    job.send(engine(now_s(), running=value))
    assert of(job) == {}


def test_a_time_far_ahead_is_rejected(job):
    answer = job.send(engine(now_s() + 7_200, running=1))
    assert answer.rejected_data_points == 1
    assert "an hour ahead" in answer.error_message
    assert job.send(engine(now_s() + 60, running=1)).rejected_data_points == 0


def test_names_are_cut_and_stored_as_text(job):
    names = [HOSTILE, "x" * 100_000]
    for name in names:
        job.send(engine(now_s(), running=1, name=name))
    shown = sorted(of(job), key=len)
    assert len(shown[1]) == 200
    assert "<img src=x" in shown[0]


def test_the_number_of_series_is_bounded(job):
    points = [("vllm:num_requests_running", {"engine": str(number)}, 1) for number in range(2_100)]
    resource = {"service.instance.id": "node-1:8000"}
    job.send(gauges(resource, now_s(), points))
    job.send(
        engine(now_s(), running=1, name="newest"), node(now_s(), memory={"used": 1, "free": 1})
    )
    load = job.get("load")
    kinds = [subject["kind"] for subject in load["subjects"]]
    assert kinds == ["engine"] * 64 + ["node"]
    assert load["omitted"] == {"engine": 1_999 - 64, "node": 0}
    assert "newest" in of(job)


@pytest.mark.parametrize("age_s", [{"max_load_age_s": 3_600}, {"max_age_s": 3_600}])
def test_old_points_are_deleted(url, job_of, later, age_s):
    job = job_of(store_url=url, retention=Retention(**age_s))
    start = now_s()
    for name in ("gone", "reporting"):
        job.send(engine(start, running=1, name=name), engine(start + 5, running=1, name=name))
    later(3_700)
    job.send(engine(start + 3_700, running=2, name="reporting"))
    period, deadline = (
        {"start_ns": start * NS, "end_ns": (start + 3_700) * NS},
        time.monotonic() + 30,
    )
    while of(job, **period) != {"reporting": {("running",): [2.0]}}:
        assert time.monotonic() < deadline, of(job, **period)
    with create_engine(url).connect() as connection:
        assert connection.scalar(text("SELECT count(*) FROM load_points")) == 1
        assert connection.scalar(text("SELECT count(*) FROM load_series")) == 1


def test_load_counts_against_the_size_of_the_store(url, job_of):
    job = job_of(store_url=url, retention=Retention(max_bytes=600_000))
    start = now_s() - 40_000
    for first in range(0, 40_000, 4_000):
        job.send(*(engine(start + first + s, running=1) for s in range(4_000)))
    deadline = time.monotonic() + 60
    period = {"start_ns": start * NS, "end_ns": (start + 4_000) * NS}
    while job.get("load", **period)["subjects"]:  # retention runs while nothing is written
        assert time.monotonic() < deadline
    assert of(job, start_ns=(start + 39_000) * NS, end_ns=(start + 40_000) * NS)
