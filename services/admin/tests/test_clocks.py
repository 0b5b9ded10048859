"""A host whose clock is wrong: its times are put right, and the page says so."""

import pytest
from fastapi.testclient import TestClient
from opentelemetry.proto.logs.v1.logs_pb2 import LogsData
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

PROTOBUF = {"content-type": "application/x-protobuf"}
TRACE, ROOT, TRAIN = bytes(range(16)), b"rootroot", b"traintra"
SECOND = 1_000_000_000
BEGAN = 1_790_000_000 * SECOND
AHEAD = 45 * SECOND
NOTE = "the clock of host worker is 44.0 s or more ahead; what it told is shown earlier by that"


@pytest.fixture
def client(make_app):
    with TestClient(make_app(), base_url="http://localhost") as client:
        yield client


def describe(resource, service, host):
    resource.attributes.add(key="service.name").value.string_value = service
    resource.attributes.add(key="host.name").value.string_value = host
    resource.attributes.add(key="process.pid").value.int_value = 7


def post_step(client):
    """Five seconds, of which the worker trained from the first second to the fourth."""
    data = TracesData()
    trained = BEGAN + AHEAD + SECOND, BEGAN + AHEAD + 4 * SECOND
    for service, host, span_id, parent, name, (start, end) in (
        ("grpo.driver", "head", ROOT, b"", "grpo.step", (BEGAN, BEGAN + 5 * SECOND)),
        ("grpo.policy", "worker", TRAIN, ROOT, "train", trained),
    ):
        made = data.resource_spans.add()
        describe(made.resource, service, host)
        span = made.scope_spans.add().spans.add(
            trace_id=TRACE,
            span_id=span_id,
            parent_span_id=parent,
            name=name,
            start_time_unix_nano=start,
            end_time_unix_nano=end,
        )
        span.attributes.add(key="rl.step").value.int_value = 0
    answer = client.post("/v1/traces", content=data.SerializeToString(), headers=PROTOBUF)
    assert answer.status_code == 200


def post_event(client, service, host, name, at, span_id):
    data = LogsData()
    made = data.resource_logs.add()
    describe(made.resource, service, host)
    record = made.scope_logs.add().log_records.add(
        event_name=f"dataplane.{name}", time_unix_nano=at, trace_id=TRACE, span_id=span_id
    )
    record.body.string_value = '["sample-1"]'
    record.attributes.add(key="dataplane.partition").value.string_value = "train"
    answer = client.post("/v1/logs", content=data.SerializeToString(), headers=PROTOBUF)
    assert answer.status_code == 200


def test_a_trace_has_the_length_of_its_step_and_says_which_clock_is_wrong(client):
    post_step(client)
    trace = client.get("/api/v1/trace", params={"id": TRACE.hex()}).json()
    assert trace["clocks"] == [NOTE]
    assert trace["seconds"] == 5
    assert [(row["name"], row["start_s"], row["seconds"]) for row in trace["rows"]] == [
        ("grpo.step", 0, 5),
        ("train", 2, 3),
    ]
    assert NOTE in client.get("/trace", params={"id": TRACE.hex()}).text
    compared = client.get("/api/v1/trace/compare", params={"a": TRACE.hex(), "b": TRACE.hex()})
    assert compared.json()["notes"] == [f"A: {NOTE}", f"B: {NOTE}"]
    assert compared.json()["a"]["seconds"] == 5


def test_the_life_of_a_sample_keeps_its_order_and_its_links(client):
    post_step(client)
    post_event(client, "grpo.policy", "worker", "read", BEGAN + AHEAD + 2 * SECOND, TRAIN)
    post_event(client, "grpo.driver", "head", "put", BEGAN + SECOND // 2, ROOT)
    post_event(client, "grpo.driver", "head", "cleared", BEGAN + 9 * SECOND // 2, ROOT)
    life = client.get("/api/v1/sample", params={"id": "sample-1"}).json()
    assert [(hop["name"], hop["seconds"], hop["span_id"]) for hop in life["hops"]] == [
        ("put", 0, ROOT.hex()),
        ("read", 2.5, TRAIN.hex()),
        ("cleared", 4, ROOT.hex()),
    ]
    assert {hop["trace_id"] for hop in life["hops"]} == {TRACE.hex()}
