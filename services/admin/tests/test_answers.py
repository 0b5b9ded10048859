"""API answers about an active run, over HTTP from a separate process."""

import shutil
import time
from types import SimpleNamespace

import httpx
import pytest
from waiting import until

from dataplane_admin import models

TOKEN = "3f2b8c0d9e7a6b5c"
TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def client(running):
    headers = {"authorization": f"Bearer {TOKEN}"}
    with httpx.Client(base_url=running.url, headers=headers, timeout=TIMEOUT_S) as client:

        def is_complete():
            partition = client.get("/api/v1/partition", params={"id": "train"}).json()
            ready = [task["ready"] for task in partition.get("tasks", ())]
            return ready[:1] == [5] and client.get("/api/v1/why").json()

        until(is_complete, TIMEOUT_S)  # the last events arrive shortly after the URL
        yield client


def ask(client, path, **query):
    answer = client.get(f"/api/v1/{path}", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def steps(client):
    traces = models.Traces.model_validate(ask(client, "traces", run="tests")).traces
    return [trace for trace in traces if trace.name == "grpo.step"]


def test_the_status_has_store_and_live_data_plane(client):
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
    written = {field.name: (field.written, field.nbytes) for field in partition.fields}
    assert written == {"input_ids": (8, 8 * 64), "advantages": (5, 5 * 4)}
    [task] = partition.tasks
    assert (task.unclaimed, task.ready) == (8, 5)
    assert sorted(task.needs) == ["advantages", "input_ids"]
    assert task.oldest_unclaimed_s > 0
    # The polls may miss steps. Each step puts, claims and clears all eight samples.
    assert set(task.backlog) <= {0, 8}
    assert task.backlog[-1] == 8


def test_the_matrix_shows_where_the_gap_is(client):
    matrix = models.Matrix.model_validate(ask(client, "partition/matrix", id="train", windows=8))
    assert (matrix.total, matrix.scanned, len(matrix.windows)) == (8, 8, 8)
    gaps = [window.written[matrix.fields.index("advantages")] for window in matrix.windows]
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


def test_a_sample_lifecycle_has_every_hop_with_its_trace(client):
    life = models.SampleLife.model_validate(ask(client, "sample", id="step1_p0_g0"))
    names = [hop.name for hop in life.hops]
    assert names[:3] == ["put", "put", "claimed"]
    assert names[-1] == "cleared"
    assert {"trained", "acknowledged", "dropped"} <= set(names)
    assert life.live is None
    [step] = [trace for trace in steps(client) if trace.step == 1]
    assert {hop.trace_id for hop in life.hops} == {step.trace_id}
    trace = models.Trace.model_validate(ask(client, "trace", id=step.trace_id))
    assert {hop.span_id for hop in life.hops} <= {row.span_id for row in trace.rows}


def test_samples_are_found_by_prefix_page_by_page(client):
    ids, cursor = [], None
    for _ in range(10):
        query = {"q": "step0_", "limit": 3, **({"cursor": cursor} if cursor else {})}
        hits = models.SampleHits.model_validate(ask(client, "samples", **query))
        ids += [sample.sample_id for sample in hits.samples]
        cursor = hits.next
        if cursor is None:
            break
    assert ids == [f"step0_p{place // 4}_g{place}" for place in range(8)]


@pytest.mark.parametrize(("value", "count"), [("g1", 4), ("nothing", 0)])
def test_samples_are_found_by_tag(client, value, count):
    hits = models.SampleHits.model_validate(ask(client, "samples", tag="group", value=value))
    assert (len(hits.samples), hits.next) == (count, None)
    assert len(ask(client, "samples", tag="reward", value="3")["samples"]) == 1


@pytest.mark.parametrize(("limit", "notes"), [(3, ["only the first 3 are shown"]), (4, [])])
def test_an_incomplete_search_by_tag_has_a_note(client, limit, notes):
    query = {"tag": "group", "value": "g1", "partition": "train", "limit": limit}
    hits = models.SampleHits.model_validate(ask(client, "samples", **query))
    assert (len(hits.samples), hits.notes) == (limit, notes)


def test_why_filters_by_run(client):
    assert [wait["run_id"] for wait in ask(client, "why", run="tests")] == ["tests"]
    assert ask(client, "why", run="another") == []


def test_why_names_the_task_the_field_and_the_samples(client):
    [wait] = [models.Wait.model_validate(row) for row in ask(client, "why")]
    assert (wait.kind, wait.task, wait.partition, wait.requested) == ("wait", "train", "train", 8)
    assert wait.lacks["advantages"].count == 3
    assert wait.blocking == ["step2_p1_g5", "step2_p1_g6", "step2_p1_g7"]
    assert "3 of 8 lack advantages (step2_p1_g5, step2_p1_g6, …)" in wait.sentence


def test_staleness_counts_what_was_trained(client):
    staleness = models.Staleness.model_validate(ask(client, "staleness"))
    assert (staleness.run_id, staleness.counts, staleness.mean) == ("tests", {0: 16}, 0)


def test_a_trace_has_its_waterfall_critical_path_and_links_out(client):
    [step] = [item for item in steps(client) if item.step == 0]
    trace = models.Trace.model_validate(ask(client, "trace", id=step.trace_id))
    assert trace.incomplete == []
    assert (trace.rows[0].name, trace.rows[0].depth) == ("grpo.step", 0)
    assert len(trace.rows) == trace.spans
    assert sum(item.seconds for item in trace.critical_path) == pytest.approx(trace.seconds)
    assert trace.staleness.samples == 8
    [link] = trace.external
    assert link.url == f"http://jaeger.example:16686/trace/{step.trace_id}"
    assert {item.stage for item in trace.stages} >= {"rollout"}


def test_two_steps_are_compared_span_by_span(client):
    first, second = sorted(steps(client), key=lambda row: row.step)[:2]
    comparison = models.TraceComparison.model_validate(
        ask(client, "trace/compare", a=first.trace_id, b=second.trace_id)
    )
    assert comparison.rows[0].name == "grpo.step"
    assert comparison.rows[0].difference_s == pytest.approx(second.seconds - first.seconds)
    assert all(row.a_count == row.b_count for row in comparison.rows)


def test_the_service_makes_no_spans_of_its_own_requests(client):
    names = {trace["name"] for trace in ask(client, "traces", limit=1000)["traces"]}
    assert not any(name.startswith(("GET", "POST", "fastapi")) for name in names)


def test_an_unchanged_answer_is_304(client):
    first = client.get("/api/v1/staleness")
    headers = {"if-none-match": f'"other", {first.headers["etag"]}'}
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:  # a metric may arrive in between
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
def test_an_unknown_id_is_a_404_with_a_reason(client, path, query):
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
def test_an_invalid_parameter_is_a_422_with_the_expected_value(client, path, query):
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
def test_ids_may_contain_any_character(client, name):
    for path in ("sample", "partition"):
        answer = client.get(f"/api/v1/{path}", params={"id": name})
        assert answer.status_code == 404
        assert answer.json()["detail"].isprintable()


def test_metrics_are_in_prometheus_format(client):
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    lines = answer.text.splitlines()
    assert 'dataplane_partition_samples{partition="train"} 8.0' in lines
    assert "dataplane_admin_live_attached 1.0" in lines
    line = 'dataplane_task_samples{partition="train",state="unclaimed",task="train"} 8.0'
    assert line in lines


def test_attached_service_is_ready(client):
    answer = client.get("/readyz", headers={"authorization": ""})
    assert (answer.status_code, answer.json()["live"]) == (200, "attached")


def test_service_is_ready_without_the_data_plane(job_of):
    answer = job_of(ray_address="127.0.0.1:1").client.get("/readyz")
    assert (answer.status_code, answer.json()["ready"]) == (200, True)
    assert answer.json()["live"].startswith("Ray at 127.0.0.1:1: ")


def test_service_is_not_ready_while_the_disk_is_full(job, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=4096))
    answer = job.client.get("/readyz")
    assert answer.status_code == 503
    assert answer.json()["store"] == "the store's disk is full: 4096 bytes left"
