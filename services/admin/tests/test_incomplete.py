"""A trace of which something is missing says so."""

import os

import pytest
from fastapi.testclient import TestClient
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality, MetricsData
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

PROTOBUF = {"content-type": "application/x-protobuf"}
DELTA = AggregationTemporality.AGGREGATION_TEMPORALITY_DELTA
CUMULATIVE = AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE
TRACE = bytes(range(16))


@pytest.fixture
def client(make_app):
    with TestClient(make_app(), base_url="http://localhost") as client:
        yield client


def describe(resource, service, pid):
    resource.attributes.add(key="service.name").value.string_value = service
    resource.attributes.add(key="host.name").value.string_value = "node"
    resource.attributes.add(key="process.pid").value.int_value = pid


def post_step(client):
    data = TracesData()
    made = data.resource_spans.add()
    describe(made.resource, "grpo.driver", 7)
    made.scope_spans.add().spans.add(
        trace_id=TRACE,
        span_id=os.urandom(8),
        name="grpo.step",
        start_time_unix_nano=1_000,
        end_time_unix_nano=2_000,
    )
    answer = client.post("/v1/traces", content=data.SerializeToString(), headers=PROTOBUF)
    assert answer.status_code == 200


def post_dropped(client, service, pid, counts, *, at=3_000, temporality=CUMULATIVE):
    data = MetricsData()
    made = data.resource_metrics.add()
    describe(made.resource, service, pid)
    metric = made.scope_metrics.add().metrics.add(name="dataplane.telemetry.dropped", unit="{item}")
    metric.sum.is_monotonic = True
    metric.sum.aggregation_temporality = temporality
    for (signal, reason), count in counts.items():
        point = metric.sum.data_points.add(as_int=count, time_unix_nano=at)
        point.attributes.add(key="dataplane.signal").value.string_value = signal
        point.attributes.add(key="dataplane.reason").value.string_value = reason
    answer = client.post("/v1/metrics", content=data.SerializeToString(), headers=PROTOBUF)
    assert answer.status_code == 200


def incomplete(client):
    return client.get("/api/v1/trace", params={"id": TRACE.hex()}).json()["incomplete"]


def test_spans_that_a_process_of_the_step_lost_are_told(client):
    post_step(client)
    post_dropped(client, "grpo.driver", 7, {("spans", "queue_full"): 0})
    assert incomplete(client) == []
    lost = {("spans", "queue_full"): 3, ("spans", "export_failed"): 4, ("events", "shutdown"): 9}
    post_dropped(client, "grpo.driver", 7, lost)
    [reason] = incomplete(client)
    assert reason.startswith("grpo.driver lost 7 spans")
    page = client.get("/trace", params={"id": TRACE.hex()}).text
    assert "lost 7 spans" in page


def test_spans_lost_are_counted_from_deltas_as_well(client):
    post_step(client)
    for at, count in enumerate((3, 0, 0), 1):
        lost = {("spans", "queue_full"): count}
        for _ in range(2):  # the second time sent again
            post_dropped(client, "grpo.driver", 7, lost, at=at, temporality=DELTA)
    [reason] = incomplete(client)
    assert reason.startswith("grpo.driver lost 3 spans")


def test_what_others_lost_is_not(client):
    post_step(client)
    post_dropped(client, "grpo.driver", 8, {("spans", "queue_full"): 3})
    post_dropped(client, "grpo.driver", 7, {("events", "queue_full"): 3})
    assert incomplete(client) == []
