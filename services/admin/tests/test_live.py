"""The live data plane, also if it is slow or unreachable.

Scans and trends are tested directly: their budget and windows need a clock and numbers that no data
plane reaches in a reasonable time. So internals are imported.
"""

import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from waiting import until

from dataplane_admin.live import Scan
from dataplane_admin.live.scan import SHARE, Scanner
from dataplane_admin.live.stuck import MAX_SIGNS
from dataplane_admin.live.trend import POLLS, Trends
from dataplane_core import InMemoryDataPlaneClient, PartitionSummary, TaskSummary, UnavailableError

TIMEOUT_S = 20.0


class Watched:
    """A data plane that can be unreachable or slow, and records its calls."""

    fault = None
    tasks_claim = False

    def __init__(self, plane):
        self.plane = plane
        self.is_away = False
        self.lost = set()
        self.free = threading.Event()
        self.free.set()
        self.calls = []

    def __getattr__(self, name):
        def ask(*args, **kwargs):
            if self.is_away or name in self.lost:
                raise UnavailableError("the directory does not answer")
            self.calls.append((name, *args))
            if name == "list_samples":
                self.free.wait(TIMEOUT_S)
            return getattr(self.plane, name)(*args, **kwargs)

        return ask


@pytest.fixture
def plane():
    cfg = {"enabled": True, "impl": "in_memory", "claim_lease_s": 60.0}
    with InMemoryDataPlaneClient(cfg) as client:
        yield client


@pytest.fixture
def watched(plane):
    return Watched(plane.inspector)


@pytest.fixture
def start_polling(job_of, watched):
    """Start a service that polls the data plane every 20 ms."""

    def start(**settings):
        return job_of(inspector=watched, **({"poll_s": 0.02} | settings))

    return start


def put(plane, ids, *fields, partition="train"):
    columns = {name: torch.zeros(len(ids), 4) for name in fields}
    plane.put_samples(ids, partition, TensorDict(columns, [len(ids)]))


def live(job):
    return job.get("status")["live"]


def present(job):
    return {
        partition["id"]: partition["present"] for partition in job.get("partitions")["partitions"]
    }


def test_the_revision_grows_with_visible_changes(plane, start_polling):
    plane.register_partition("train", ["a"], 8, ["t"])
    job = start_polling()
    until(lambda: present(job) == {"train": 0})
    before = live(job)["revision"]
    put(plane, ["s0"], "a")
    until(lambda: present(job) == {"train": 1})
    assert live(job)["revision"] > before


def test_growing_ages_do_not_change_the_revision(plane, watched, start_polling):
    plane.register_partition("train", ["a"], 8, ["t"])
    put(plane, ["s0", "s1"], "a")
    plane.claim_meta("train", "t", ["a"], 1, blocking=False)
    job = start_polling(stuck_after_s=0.05)
    until(lambda: job.get("why"))
    before, polls = live(job)["revision"], len(watched.calls)
    until(lambda: len(watched.calls) > polls + 100)
    assert live(job)["revision"] <= before + 2  # every five seconds ages are updated


def test_only_changed_partitions_are_scanned_again(plane, watched, start_polling):
    for name in ("idle", "busy"):
        plane.register_partition(name, ["a"], 8, ["t"])
        put(plane, ["s0"], "a", partition=name)
    job = start_polling()

    def scanned(name):
        return job.get("partition/matrix", id=name)["scanned"]

    until(lambda: scanned("idle") == scanned("busy") == 1)
    put(plane, ["s1"], "a", partition="busy")
    until(lambda: scanned("busy") == 2)
    assert [call[1] for call in watched.calls if call[0] == "scan_states"].count("idle") == 1


def test_partitions_of_another_plane_are_scanned_again(plane, watched, start_polling):
    cfg = {"enabled": True, "impl": "in_memory"}
    with InMemoryDataPlaneClient(cfg) as other:
        for store, field in ((plane, "a"), (other, "b")):
            store.register_partition("train", ["a", "b"], 8, ["t"])
            put(store, ["s0"], field)
        first, second = (store.inspector.list_partitions()[0] for store in (plane, other))
        assert first.revision == second.revision
        job = start_polling()

        def written():
            matrix = job.get("partition/matrix", id="train")
            shares = [window["written"] for window in matrix["windows"]]
            return [dict(zip(matrix["fields"], each, strict=True)) for each in shares]

        until(lambda: written() == [{"a": 1, "b": 0}])
        watched.is_away = True
        until(lambda: not live(job)["attached"])
        watched.plane, watched.is_away = other.inspector, False
        until(lambda: live(job)["attached"])
        until(lambda: written() == [{"a": 0, "b": 1}])


def test_the_last_snapshot_survives_a_lost_store(plane, watched, start_polling):
    plane.register_partition("train", ["a"], 8, ["t"])
    job = start_polling()
    until(lambda: present(job))
    seen_ns = live(job)["at_ns"]
    watched.lost = {"list_storage"}
    until(lambda: job.get("partitions")["storage_error"] == "the directory does not answer")
    assert (live(job)["attached"], live(job)["error"]) == (True, None)
    assert "Cannot read the storage units" in job.client.get("/").text
    watched.lost = set()
    until(lambda: job.get("partitions")["storage_error"] is None)
    watched.is_away = True
    error = until(lambda: live(job)["error"])
    assert error == "Watched: the directory does not answer"
    assert (live(job)["attached"], present(job)) == (False, {"train": 0})
    assert live(job)["at_ns"] >= seen_ns
    answer = job.client.get("/api/v1/partition/samples", params={"id": "train"})
    assert (answer.status_code, answer.json()["detail"]) == (503, error)
    watched.is_away = False
    until(lambda: live(job)["attached"])


def test_plane_that_answers_no_clients_is_reported_and_read(plane, watched, start_polling):
    plane.register_partition("train", ["a"], 8, ["t"])
    job = start_polling()
    until(lambda: present(job))
    assert (live(job)["error"], job.get("why")) == (None, [])
    watched.fault = "its request thread ended"
    put(plane, ["s0"], "a")
    until(lambda: present(job) == {"train": 1})
    assert (live(job)["attached"], live(job)["error"]) == (True, f"Watched: {watched.fault}")
    (wait,) = job.get("why")
    assert (wait["kind"], wait["sentence"]) == ("fault", f"Watched: {watched.fault}")
    assert "its request thread ended" in job.client.get("/readyz").json()["live"]
    watched.fault = None
    until(lambda: live(job)["error"] is None)
    assert job.get("why") == []


def test_plane_that_is_lost_during_a_run_is_a_fault(plane, watched, start_polling, otlp, later):
    plane.register_partition("train", ["a"], 8, ["t"])
    job = start_polling()
    until(lambda: present(job))
    assert "dataplane_partition_samples" in job.client.get("/metrics").text
    watched.is_away = True
    until(lambda: not live(job)["attached"])
    assert "dataplane_partition_samples" not in job.client.get("/metrics").text
    assert job.get("why") == []
    later(15)
    [wait] = job.get("why")
    assert wait["kind"] == "fault"
    assert wait["sentence"].endswith("Watched: the directory does not answer")
    assert "The data plane has not answered for 1" in job.client.get("/").text
    now_s = (time.time_ns() - otlp.start_ns) / 1e9
    job.send(otlp.run("started", at_s=now_s))
    later(700)
    job.send(otlp.run("started", "other", at_s=now_s + 700))
    assert job.get("why")[0]["kind"] == "fault", "a run still needs it"
    for run in ("run", "other"):
        job.send(otlp.run("finished", run, at_s=now_s + 701))
    until(lambda: job.get("why") == [])
    watched.is_away = False
    until(lambda: live(job)["attached"])


def test_queries_have_a_deadline_and_a_maximum(plane, watched, start_polling):
    plane.register_partition("train", ["a"], 8, ["t"])
    job = start_polling(query_timeout_s=0.1)
    until(lambda: present(job))
    watched.free.clear()
    try:
        answers = [
            job.client.get("/api/v1/partition/samples", params={"id": "train"}) for _ in range(5)
        ]
    finally:
        watched.free.set()
    assert [answer.status_code for answer in answers] == [504] * 4 + [503]
    assert "no answer within 0.1 s" in answers[0].json()["detail"]
    assert "4 queries are running already; retry" in answers[4].json()["detail"]


def test_idle_tasks_and_old_claims_are_listed_with_ids(plane, start_polling, otlp):
    plane.register_partition("train", ["a", "b"], 8, ["idle", "slow"])
    put(plane, [f"s{i}" for i in range(4)], "a")
    put(plane, ["s0"], "b")
    plane.claim_meta("train", "slow", ["a"], 3, blocking=False)
    job = start_polling(stuck_after_s=0.05)
    job.send(otlp.log("claimed", ["x"], task="idle"))
    waits = until(lambda: len(rows := job.get("why")) == 3 and rows)
    [idle] = [wait for wait in waits if wait["task"] == "idle"]
    assert (idle["kind"], idle["blocking"]) == ("backlog", ["s1", "s2", "s3"])  # without b
    assert idle["lacks"] == {"b": {"count": 3, "examples": []}}
    [held] = [wait for wait in waits if wait["claim"]]
    assert (held["kind"], held["task"], held["blocking"]) == ("claim", "slow", ["s0", "s1", "s2"])
    assert held["process"].partition(":")[2].isdecimal()


def test_blocked_claim_comes_first_with_its_fields(plane, watched, start_polling, monkeypatch):
    plane.register_partition("train", ["a", "b"], 8, ["idle", "waiting"])
    put(plane, [f"s{i}" for i in range(4)], "a")
    put(plane, ["s0"], "c")
    for task in ("idle", "waiting"):
        plane.claim_meta("train", task, ["a"], 1, blocking=False)

    def list_partitions():
        (summary,) = plane.inspector.list_partitions()
        idle, waiting = summary.tasks
        return [replace(summary, tasks=(idle, replace(waiting, blocked_claim_fields=("a", "c"))))]

    monkeypatch.setattr(watched, "list_partitions", list_partitions, raising=False)
    job = start_polling(stuck_after_s=0.05)
    waits = until(lambda: len(rows := job.get("why")) >= 2 and rows)
    first = next(wait for wait in waits if wait["kind"] == "backlog")
    assert first["task"] == "waiting"
    assert "its blocked claim requires a, c" in first["sentence"]
    assert {name: lack["count"] for name, lack in first["lacks"].items()} == {"c": 3}
    assert first["blocking"] == ["s1", "s2", "s3"]
    tasks = {task["name"]: task for task in job.get("partition", id="train")["tasks"]}
    assert (tasks["waiting"]["needs"], tasks["waiting"]["ready"]) == (["a", "c"], 0)


def test_samples_assigned_to_an_idle_rank_are_a_backlog(plane, start_polling, otlp):
    plane.register_partition("train", ["a"], 4, ["t"])
    put(plane, ["s0", "s1", "s2", "s3"], "a")
    plane.acknowledge(plane.claim_meta("train", "t", ["a"], 2, dp_rank=0, dp_world=2))
    job = start_polling(stuck_after_s=0.05)
    job.send(otlp.log("claimed", ["s0"], task="t", fields=["a"]))
    [wait] = until(lambda: job.get("why"))
    assert (wait["task"], wait["claim"]) == ("t", "")
    assert "2 of 4 samples" in wait["sentence"]
    [task] = job.get("partition", id="train")["tasks"]
    counts = [task[name] for name in ("unclaimed", "assigned", "acknowledged", "ready")]
    assert counts == [0, 2, 2, 0]


def test_a_progressing_task_is_not_blocked(plane, start_polling):
    plane.register_partition("train", ["a"], 20_000, ["t"])
    put(plane, [f"s{i}" for i in range(20_000)], "a")
    job = start_polling(stuck_after_s=0.3)
    until(lambda: present(job))
    ended = threading.Event()

    def consume():
        while not ended.wait(0.01):
            plane.acknowledge(plane.claim_meta("train", "t", ["a"], 2, blocking=False))

    consumer = threading.Thread(target=consume)
    consumer.start()
    try:
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            assert [wait for wait in job.get("why") if not wait["claim"]] == []
        assert job.get("partition", id="train")["tasks"][0]["oldest_unclaimed_s"] > 0.3
    finally:
        ended.set()
        consumer.join()


def test_only_a_task_that_claims_has_a_backlog(plane, start_polling):
    tasks = ["by_key", "claims"]
    plane.register_partition("train", ["a"], 8, tasks)
    job = start_polling(stuck_after_s=0.1)
    put(plane, ["s0"], "a")
    plane.claim_meta("train", "claims", ["a"], 1, blocking=False)
    until(lambda: present(job) and job.get("partition", id="train")["tasks"][1]["leased"])
    plane.clear_samples(None, "train", force=True)
    until(lambda: present(job) == {})
    plane.register_partition("train", ["a"], 8, tasks)
    put(plane, ["s1"], "a")
    until(lambda: job.get("why"))
    until(lambda: (job.get("partition", id="train")["tasks"][0]["oldest_unclaimed_s"] or 0) > 0.5)
    assert {(wait["task"], wait["claim"]) for wait in job.get("why")} == {("claims", "")}


def test_each_task_of_a_queue_has_a_backlog(plane, watched, start_polling):
    """Tasks of a queue are not declared: a task exists because it asked for samples."""
    watched.tasks_claim = True
    plane.register_partition("train", ["a", "b"], 8, ["polls"])
    job = start_polling(stuck_after_s=0.1)
    put(plane, ["s0"], "a")
    [wait] = until(lambda: job.get("why"))
    assert (wait["task"], wait["lacks"]["b"]["count"]) == ("polls", 1)


def test_the_number_of_stuck_tasks_is_bounded(plane, start_polling):
    for number in range(MAX_SIGNS + 10):
        plane.register_partition(f"p{number}", ["a"], 8, ["by_key", "t"])
        put(plane, ["s0"], "a", partition=f"p{number}")
        plane.claim_meta(f"p{number}", "t", ["a"], 1, blocking=False)
    job = start_polling(stuck_after_s=0.05)
    until(lambda: len(job.get("why")) == MAX_SIGNS)


def test_closing_ends_the_thread(job_class, make_app, plane):
    with job_class(make_app(inspector=plane.inspector)) as job:
        until(lambda: live(job)["attached"])
    assert "dataplane-admin-live" not in {thread.name for thread in threading.enumerate()}


def test_a_query_during_shutdown_is_refused_with_a_reason(plane, start_polling):
    plane.register_partition("train", ["a"], 8, ["t"])
    job = start_polling()
    until(lambda: "train" in present(job))
    job.app.state.live.close()
    answer = job.client.get("/api/v1/partition/samples", params={"id": "train"})
    assert answer.status_code == 503
    assert answer.json()["detail"] == "the service is shutting down; retry later"


class _Slow:
    """A store of which reading a page costs a second by the test's clock."""

    def __init__(self, plane):
        self.plane = plane
        self.now = 0.0
        self.pages = 0

    def scan_states(self, partition_id, *, start, limit):
        self.now += 1.0
        self.pages += 1
        return self.plane.scan_states(partition_id, start=start, limit=limit)


def test_scans_stay_within_their_share_of_time(plane):
    plane.register_partition("train", ["a"], 8, ["t"])
    slow = _Slow(plane.inspector)
    scanner = Scanner(clock=lambda: slow.now)
    for number in range(2_000):
        put(plane, [f"s{number}"], "a")
        scanner.scan(slow, plane.inspector.list_partitions(), [], lambda: False)
        slow.now += 0.5
    assert 0.5 * SHARE < slow.pages / slow.now < 1.05 * SHARE


def test_shown_partitions_are_scanned_first(plane):
    for name in ("a", "b", "c"):
        plane.register_partition(name, ["x"], 8, ["t"])
    slow = _Slow(plane.inspector)
    scanner = Scanner(clock=lambda: slow.now)
    assert set(scanner.scan(slow, plane.inspector.list_partitions(), ["c"], lambda: False)) == {"c"}


@settings(max_examples=50)
@given(data=st.data(), rows=st.integers(0, 300), windows=st.integers(1, 50))
def test_windows_cover_every_sample_once(data, rows, windows):
    seed = data.draw(st.integers(0, 2**32 - 1))
    generator = np.random.default_rng(seed)
    written = generator.integers(0, 2, (rows, 3), dtype=np.uint8)
    states = generator.integers(0, 4, (rows, 2), dtype=np.uint8)
    scan = Scan("p", 1, 0, rows, ("a", "b", "c"), ("t", "u"), written, states)
    covered = scan.windows(windows)
    assert len(covered) <= windows
    assert sum(window.count for window in covered) == rows
    assert [window.start for window in covered] == list(
        np.cumsum([0, *(window.count for window in covered)])
    )[:-1]
    for window in covered:
        of = slice(window.start, window.start + window.count)
        assert np.allclose(window.written, written[of].mean(axis=0), atol=1e-4)
        for task, shares in enumerate(window.tasks):
            assert sum(shares) == pytest.approx(1, abs=4e-4)
            assert np.allclose(
                shares, [(states[of, task] == s).mean() for s in range(4)], atol=1e-4
            )


def test_history_covers_an_hour():
    history = Trends(interval_s=30.0)
    summary = PartitionSummary(
        partition_id="p",
        declared=0,
        put=0,
        present=0,
        reserved=0,
        group_size=None,
        fields=(),
        tasks=(),
    )
    for second in range(2 * 3600):
        trend = history.add(second * 1_000_000_000, [replace(summary, put=second)])["p"]
    assert trend.seconds == 30 * (POLLS - 1)
    assert trend.put[-1] >= 2 * 3600 - 30


def test_history_is_answered_by_partition(plane, start_polling):
    plane.register_partition("train", ["a"], 8, ["t"])
    put(plane, ["s0", "s1"], "a")
    job = start_polling()
    until(lambda: present(job) == {"train": 2})
    answer = job.get("partition/history", id="train")
    assert (answer["put"], len(answer["times_ns"])) == ([2], 1)
    assert answer["tasks"] == [{"name": "t", "unclaimed": [2], "claimed": [0], "acknowledged": [0]}]


def test_trends_do_not_count_a_decrease_as_growth():
    trends = Trends()
    for poll in range(POLLS + 30):
        acknowledged = poll % 10  # cleared every tenth poll
        task = TaskSummary(name="t", unclaimed=poll, leased=0, acknowledged=acknowledged, leases=0)
        summary = PartitionSummary(
            partition_id="p",
            declared=0,
            put=2 * poll,
            present=0,
            reserved=0,
            group_size=None,
            fields=(),
            tasks=(task,),
        )
        trend = trends.add(poll * 1_000_000_000, [summary])["p"]
    assert (len(trend.times_ns), trend.seconds) == (POLLS, POLLS - 1)
    assert trend.gained_per_s(trend.put) == 2
    assert trend.slope_per_s(trend.tasks["t"].unclaimed) == 1
    assert trend.gained_per_s(trend.tasks["t"].acknowledged) == pytest.approx(0.9, abs=0.02)
    assert trends.add(0, []) == {}
