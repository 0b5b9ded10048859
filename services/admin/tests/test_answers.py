"""What the API answers about a run that goes on, over HTTP from a process of its own."""

import time

import httpx
import pytest
from fastapi.testclient import TestClient

from dataplane_admin import Settings, create_app
from dataplane_admin.answers import models
from dataplane_admin.store import Store

TOKEN = "3f2b8c0d9e7a6b5c"
PATIENCE_S = 20.0


@pytest.fixture(scope="module")
def client(running):
    headers = {"authorization": f"Bearer {TOKEN}"}
    with httpx.Client(base_url=running.url, headers=headers, timeout=PATIENCE_S) as client:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:  # the last events come a moment after the URL
            told = client.get("/api/v1/partition", params={"id": "train"}).json()
            if told.get("tasks", [{}])[0].get("ready") == 5 and client.get("/api/v1/why").json():
                break
        yield client


def ask(client, path, **query):
    answer = client.get(f"/api/v1/{path}", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def steps(client):
    found = models.Traces.model_validate(ask(client, "traces", run="tests")).traces
    return [one for one in found if one.name == "grpo.step"]


def test_the_status_tells_of_store_and_live(client):
    status = models.Status.model_validate(ask(client, "status"))
    assert status.live.attached
    assert status.live.error is None
    assert status.live.age_s < 5
    assert status.store.writable
    assert status.store.events > 10
    assert status.telemetry.refused == 0
    assert status.telemetry.ingested["spans"] == status.store.spans


def test_a_partition_has_counts_bytes_ages_and_what_is_ready(client):
    partition = models.Partition.model_validate(ask(client, "partition", id="train"))
    assert (partition.declared, partition.put, partition.present) == (8, 8, 8)
    written = {one.name: (one.written, one.nbytes) for one in partition.fields}
    assert written == {"input_ids": (8, 8 * 64), "advantages": (5, 5 * 4)}
    [task] = partition.tasks
    assert (task.unclaimed, task.ready) == (8, 5)
    assert sorted(task.needs) == ["advantages", "input_ids"]
    assert task.oldest_unclaimed_s > 0
    assert set(task.backlog) <= {8, *task.backlog[:1]}


def test_the_matrix_shows_where_the_gap_is(client):
    matrix = models.Matrix.model_validate(ask(client, "partition/matrix", id="train", windows=8))
    assert (matrix.total, matrix.scanned, len(matrix.windows)) == (8, 8, 8)
    gaps = [one.written[matrix.fields.index("advantages")] for one in matrix.windows]
    assert gaps == [1.0] * 5 + [0.0] * 3


def test_drilling_down_ends_at_one_sample(client):
    page = models.SamplePage.model_validate(
        ask(client, "partition/samples", id="train", start=6, limit=1)
    )
    [sample] = page.samples
    assert (page.total, sample.sample_id, sample.fields) == (8, "step2_p1_g6", ["input_ids"])
    life = models.SampleLife.model_validate(ask(client, "sample", id=sample.sample_id))
    assert life.live.tags == {"group": "g1", "reward": 6}
    assert [hop.name for hop in life.hops] == ["put"]


def test_a_life_goes_from_its_put_to_its_clear_and_each_hop_has_its_trace(client):
    life = models.SampleLife.model_validate(ask(client, "sample", id="step1_p0_g0"))
    names = [hop.name for hop in life.hops]
    assert names[:3] == ["put", "put", "claimed"]
    assert names[-1] == "cleared"
    assert {"trained", "acknowledged", "dropped"} <= set(names)
    assert life.live is None
    [step] = [one for one in steps(client) if one.step == 1]
    assert {hop.trace_id for hop in life.hops} == {step.trace_id}
    trace = models.Trace.model_validate(ask(client, "trace", id=step.trace_id))
    assert {hop.span_id for hop in life.hops} <= {row.span_id for row in trace.rows}


def test_samples_are_found_by_prefix_page_by_page(client):
    found, cursor = [], None
    for _ in range(10):
        query = {"q": "step0_", "limit": 3, **({"cursor": cursor} if cursor else {})}
        hits = models.SampleHits.model_validate(ask(client, "samples", **query))
        found += [one.sample_id for one in hits.samples]
        cursor = hits.next
        if cursor is None:
            break
    assert found == [f"step0_p{place // 4}_g{place}" for place in range(8)]


@pytest.mark.parametrize(("value", "count"), [("g1", 4), ("nothing", 0)])
def test_samples_are_found_by_tag(client, value, count):
    hits = models.SampleHits.model_validate(ask(client, "samples", tag="group", value=value))
    assert (len(hits.samples), hits.next) == (count, None)
    assert len(ask(client, "samples", tag="reward", value="3")["samples"]) == 1


def test_why_of_one_run_leaves_out_the_others(client):
    assert [one["run_id"] for one in ask(client, "why", run="tests")] == ["tests"]
    assert ask(client, "why", run="another") == []


def test_why_names_the_task_the_field_and_the_samples(client):
    [wait] = [models.Wait.model_validate(one) for one in ask(client, "why")]
    assert (wait.kind, wait.task, wait.partition, wait.asked) == ("wait", "train", "train", 8)
    assert wait.lacks["advantages"].count == 3
    assert wait.blocking == ["step2_p1_g5", "step2_p1_g6", "step2_p1_g7"]
    assert "3 of 8 lack advantages (step2_p1_g5, step2_p1_g6, …)" in wait.sentence


def test_staleness_counts_what_was_trained(client):
    staleness = models.Staleness.model_validate(ask(client, "staleness"))
    assert (staleness.run_id, staleness.counts, staleness.mean) == ("tests", {0: 16}, 0)


def test_a_trace_has_its_waterfall_critical_path_and_links_out(client):
    [step] = [one for one in steps(client) if one.step == 0]
    trace = models.Trace.model_validate(ask(client, "trace", id=step.trace_id))
    assert trace.incomplete == []
    assert (trace.rows[0].name, trace.rows[0].depth) == ("grpo.step", 0)
    assert len(trace.rows) == trace.spans
    assert sum(one.seconds for one in trace.critical_path) == pytest.approx(trace.seconds)
    assert trace.staleness.samples == 8
    [link] = trace.external
    assert link.url == f"http://jaeger.example:16686/trace/{step.trace_id}"
    assert {one.stage for one in trace.stages} >= {"rollout"}


def test_two_steps_are_compared_place_by_place(client):
    first, second = sorted(steps(client), key=lambda one: one.step)[:2]
    told = models.TraceComparison.model_validate(
        ask(client, "trace/compare", a=first.trace_id, b=second.trace_id)
    )
    assert told.rows[0].name == "grpo.step"
    assert told.rows[0].difference_s == pytest.approx(second.seconds - first.seconds)
    assert all(one.a_count == one.b_count for one in told.rows)


def test_the_service_makes_no_spans_of_its_own_requests(client):
    names = {one["name"] for one in ask(client, "traces", limit=1000)["traces"]}
    assert not any(name.startswith(("GET", "POST", "fastapi")) for name in names)


def test_an_answer_is_not_sent_twice(client):
    first = client.get("/api/v1/staleness")
    headers = {"if-none-match": f'"other", {first.headers["etag"]}'}
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:  # a metric may come in between
        again = client.get("/api/v1/staleness", headers=headers)
        if again.status_code == 304:
            break
        headers = {"if-none-match": again.headers["etag"]}
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"]


@pytest.mark.parametrize(
    ("path", "query"),
    [
        ("partition", {"id": "nothing"}),
        ("partition/samples", {"id": "nothing"}),
        ("partition/claims", {"id": "nothing"}),
        ("partition/matrix", {"id": "nothing"}),
        ("sample", {"id": "nothing"}),
        ("sample", {"id": "step1_p0_g0", "partition": "nothing"}),
        ("trace", {"id": "0" * 32}),
    ],
)
def test_what_is_not_there_is_a_404_that_says_so(client, path, query):
    answer = client.get(f"/api/v1/{path}", params=query)
    assert answer.status_code == 404
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["detail"]


@pytest.mark.parametrize(
    ("path", "query"),
    [
        ("trace", {"id": "../../etc/passwd"}),
        ("trace", {"id": "%2e%2e%2f"}),
        ("trace", {"id": "g" * 32}),
        ("trace", {"id": "a" * 33}),
        ("trace", {"id": "a" * 31 + "\n"}),
        ("trace", {}),
        ("sample", {"id": ""}),
        ("sample", {"id": "x" * 4097}),
        ("partition", {"id": "x" * 4097}),
        ("partition/matrix", {"id": "train", "windows": 0}),
        ("partition/matrix", {"id": "train", "windows": 501}),
        ("partition/samples", {"id": "train", "limit": 1001}),
        ("partition/samples", {"id": "train", "start": -1}),
        ("traces", {"cursor": "x"}),
        ("traces", {"cursor": "WyJzYW1wbGVzIiwicyIsMV0"}),
        ("traces", {"cursor": "W" * 20_000}),
        ("traces", {"min_s": "nan"}),
        ("traces", {"max_s": "-1"}),
        ("traces", {"step": "1" * 30}),
        ("samples", {"tag": "a", "q": "b"}),
        ("samples", {"tag": "reward", "value": "9" * 30}),
        ("staleness", {"steps": 0}),
    ],
)
def test_what_cannot_be_asked_is_a_422_that_says_what_was_expected(client, path, query):
    answer = client.get(f"/api/v1/{path}", params=query)
    if path == "samples" and query.get("value"):
        assert answer.status_code in (200, 422)
        return
    assert answer.status_code == 422, answer.text
    detail = answer.json()["detail"]
    assert "found" in detail
    assert "expected" in detail
    assert len(detail) < 500


@pytest.mark.parametrize(
    "name", ["a/b", "..", "\0", "\u202e", "%00", "<script>", "'; DROP TABLE", "é"]
)
def test_ids_may_hold_anything(client, name):
    for path in ("sample", "partition"):
        answer = client.get(f"/api/v1/{path}", params={"id": name})
        assert answer.status_code == 404
        assert answer.json()["detail"].isprintable()


def test_metrics_are_those_of_prometheus(client):
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    lines = answer.text.splitlines()
    assert 'dataplane_partition_samples{partition="train"} 8.0' in lines
    assert "dataplane_admin_live_attached 1.0" in lines
    told = 'dataplane_task_samples{partition="train",state="unclaimed",task="train"} 8.0'
    assert told in lines


def test_it_is_ready(client):
    answer = client.get("/readyz", headers={"authorization": ""})
    assert (answer.status_code, answer.json()["live"]) == (200, "attached")


def test_it_is_ready_while_the_data_plane_is_away(make_app):
    app = make_app(ray_address="127.0.0.1:1")
    with TestClient(app, base_url="http://127.0.0.1") as asking:
        answer = asking.get("/readyz")
    assert (answer.status_code, answer.json()["ready"]) == (200, True)
    assert answer.json()["live"].startswith("Ray at 127.0.0.1:1: ")


def test_it_is_not_ready_while_the_disk_of_its_store_is_full(tmp_path, monkeypatch):
    settings = Settings(store_url=f"sqlite:///{tmp_path / 'store.sqlite'}")
    monkeypatch.setattr(Store, "room_bytes", lambda self: 4096)
    with TestClient(create_app(settings), base_url="http://127.0.0.1") as asking:
        answer = asking.get("/readyz")
        assert answer.status_code == 503
        assert answer.json()["store"] == "the store's disk is full: 4096 bytes left"
