"""The receiver answers as the OTLP specification says, and holds its limits."""

import asyncio
import gzip
import json
import os
import threading
import tracemalloc
import zlib

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.proto.logs.v1.logs_pb2 import LogsData
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality, MetricsData
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

from dataplane_admin.ingest import Limits, router
from dataplane_admin.store import QueueFull, Store, StoreUnavailable
from observability.views import why

PROTOBUF = "application/x-protobuf"
JSON = "application/json"
TRACE = "5b8efff798038103d269b633813fc60c"
DEEP = (
    b'{"resourceSpans": [{"resource": {"attributes": [{"value": '
    + b'{"arrayValue": {"values": [' * 200
    + b"]}}" * 200
    + b"}]}}]}"
)
examples = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def store(tmp_path):
    with Store.open(f"sqlite:///{tmp_path}/admin.sqlite") as opened:
        yield opened


class Service:
    def __init__(self, store, limits):
        self.app = FastAPI()
        self.app.include_router(router(store, limits))

    def post(self, kind, body, content=PROTOBUF, **headers):
        async def ask():
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
                named = {key.replace("_", "-"): value for key, value in headers.items()}
                if content is not None:
                    named["content-type"] = content
                return await client.post(f"/v1/{kind}", content=body, headers=named)

        return asyncio.run(ask())


@pytest.fixture
def service(store):
    return Service(store, Limits())


def spans(count=1, *, trace_id=None, name="span", attributes=()):
    data = TracesData()
    made = data.resource_spans.add().scope_spans.add().spans
    for _ in range(count):
        span = made.add(
            trace_id=os.urandom(16) if trace_id is None else trace_id,
            span_id=os.urandom(8),
            name=name,
            start_time_unix_nano=1,
            end_time_unix_nano=2,
        )
        for key, value in attributes:
            span.attributes.add(key=key).value.string_value = value
    return data


def log(event_name="dataplane.put", body='["a"]', **attributes):
    data = LogsData()
    record = (
        data.resource_logs.add()
        .scope_logs.add()
        .log_records.add(event_name=event_name, time_unix_nano=5)
    )
    record.body.string_value = body
    for key, value in attributes.items():
        record.attributes.add(key=key).value.string_value = value
    return data


def test_protobuf_is_answered_in_protobuf_once_it_is_stored(service, store):
    answer = service.post("traces", spans(3).SerializeToString())
    assert (answer.status_code, answer.headers["content-type"]) == (200, PROTOBUF)
    assert not ExportTraceServiceResponse.FromString(answer.content).HasField("partial_success")
    assert store.totals().spans == 3


def test_the_example_of_the_specification_in_json_is_taken(service, store):
    span = {
        "traceId": TRACE.upper(),
        "spanId": "EEE19B7EC3C1B174",
        "parentSpanId": "EEE19B7EC3C1B173",
        "name": "I'm a server span",
        "startTimeUnixNano": "1544712660000000000",
        "endTimeUnixNano": "1544712661000000000",
        "kind": 2,
        "attributes": [
            {"key": "my.span.attr", "value": {"stringValue": "some value"}},
            {"key": "rl.step", "value": {"intValue": "7"}},
        ],
        "unknownField": [{"nested": {}}],
        "status": {"code": 2, "message": "no"},
    }
    body = {"resourceSpans": [{"resource": {}, "scopeSpans": [{"scope": {}, "spans": [span]}]}]}
    answer = service.post("traces", json.dumps(body).encode(), "application/json; charset=utf-8")
    assert (answer.status_code, answer.json()) == (200, {})
    assert answer.headers["content-type"] == JSON
    found = store.trace_records(TRACE).spans[0]
    assert (found.span_id, found.parent_id) == ("eee19b7ec3c1b174", "eee19b7ec3c1b173")
    assert (found.kind, found.outcome, found.seconds) == ("server", "error", 1.0)
    assert found.attributes == {"my.span.attr": "some value", "rl.step": 7}
    assert store.trace(TRACE).step == 7


@pytest.mark.parametrize("whole", [1, 3])
def test_gzip_of_one_or_several_members_is_inflated(service, store, whole):
    body = spans(30).SerializeToString()
    cut = len(body) // whole + 1
    packed = b"".join(gzip.compress(body[at : at + cut]) for at in range(0, len(body), cut))
    assert service.post("traces", packed, content_encoding="gzip").status_code == 200
    assert store.totals().spans == 30


def test_a_gzip_bomb_is_refused_without_being_inflated(service, store):
    packer = zlib.compressobj(9, wbits=31)
    bomb = b"".join(packer.compress(bytes(1 << 20)) for _ in range(64)) + packer.flush()
    assert len(bomb) < 1 << 17
    small = Service(store, Limits(inflated_bytes=1 << 20))
    tracemalloc.start()
    try:
        answer = small.post("traces", bomb, content_encoding="gzip")
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert answer.status_code == 413
    assert most < 16 << 20
    assert b"longer than 1048576 bytes" in answer.content


def test_a_body_that_is_too_long_is_refused_before_it_is_read(store):
    service = Service(store, Limits(body_bytes=1000))
    body = spans(100).SerializeToString()
    assert service.post("traces", body).status_code == 413

    async def parts():
        for at in range(0, len(body), 100):
            yield body[at : at + 100]

    assert service.post("traces", parts()).status_code == 413
    assert store.totals().spans == 0


def test_what_is_being_read_at_once_is_bounded(store):
    service = Service(store, Limits(waiting_bytes=500))
    answer = service.post("traces", spans(50).SerializeToString())
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1
    assert service.post("traces", spans(1).SerializeToString()).status_code == 200


@pytest.mark.parametrize(
    ("body", "content", "encoding", "status"),
    [
        (b"\xff\xff", PROTOBUF, None, 400),
        (b"{", JSON, None, 400),
        (b"[]", JSON, None, 400),
        (b'{"resourceSpans": 3}', JSON, None, 400),
        (b"[" * 100_000, JSON, None, 400),
        (DEEP, JSON, None, 400),
        (b'{"resourceSpans": ' + b"9" * 5000 + b"}", JSON, None, 400),
        (b"", "text/plain", None, 415),
        (b"", None, None, 415),
        (b"", PROTOBUF, "br", 415),
        (b"not gzip", PROTOBUF, "gzip", 400),
        (gzip.compress(b"x" * 1000)[:-12], PROTOBUF, "gzip", 400),
    ],
    # Not the bodies themselves: gzip's has the time, so that lanes would not agree on the tests.
    ids=[
        "no protobuf",
        "no JSON",
        "a list",
        "no list of spans",
        "deep lists",
        "deep objects",
        "a long number",
        "another type",
        "no type",
        "another encoding",
        "no gzip",
        "half of gzip",
    ],
)
def test_what_cannot_be_taken_is_answered_with_a_status(
    service, store, body, content, encoding, status
):
    headers = {"content_encoding": encoding} if encoding else {}
    answer = service.post("traces", body, content, **headers)
    assert answer.status_code == status
    if content == JSON:
        assert set(answer.json()) == {"code", "message"}
        assert answer.json()["message"]
    else:
        assert answer.headers["content-type"] == PROTOBUF
        assert answer.content[:2] == b"\x08\x03"
    assert store.totals().traces == 0


def test_refused_spans_are_counted_in_a_partial_success_and_the_rest_is_kept(store):
    service = Service(store, Limits(spans=3))
    data = spans(5, trace_id=bytes.fromhex(TRACE))
    wrong = data.resource_spans[0].scope_spans[0].spans
    wrong.add(trace_id=b"short", span_id=b"x" * 8)
    wrong.add(trace_id=bytes(16), span_id=b"x" * 8)
    body = data.SerializeToString()
    for _ in range(2):  # a retry is answered the same and changes nothing
        answer = service.post("traces", body)
        told = ExportTraceServiceResponse.FromString(answer.content).partial_success
        assert (answer.status_code, told.rejected_spans) == (200, 4)
        assert "a request may bring 3" in told.error_message
        row = store.trace(TRACE)
        assert (row.spans, row.rejected) == (3, 2)
    assert len(store.trace_records(TRACE).spans) == 3


def test_spans_that_no_database_holds_are_refused_one_by_one(service, store):
    data = spans(2)
    data.resource_spans[0].scope_spans[0].spans[0].start_time_unix_nano = (1 << 64) - 1
    answer = service.post("traces", data.SerializeToString())
    told = ExportTraceServiceResponse.FromString(answer.content).partial_success
    assert told.rejected_spans == 1
    assert store.totals().spans == 1


def test_attributes_are_cut_to_the_limits(store):
    service = Service(store, Limits(attributes=2, attribute_length=10, links=1))
    data = spans(1, attributes=[("a", "x" * 11), ("b", "é" * 20), ("c", "gone")])
    data.resource_spans[0].scope_spans[0].spans[0].trace_id = bytes.fromhex(TRACE)
    span = data.resource_spans[0].scope_spans[0].spans[0]
    span.attributes[1].value.array_value.values.add(string_value="y" * 30)
    span.links.add(trace_id=b"1" * 16, span_id=b"2" * 8)
    span.links.add(trace_id=b"3" * 16, span_id=b"4" * 8)
    assert service.post("traces", data.SerializeToString()).status_code == 200
    found = store.trace_records(TRACE).spans[0]
    assert found.attributes == {"a": "x" * 10, "b": ["y" * 10]}
    assert len(found.links) == 1


def test_several_traces_in_a_request_are_kept_apart_with_their_processes(service, store):
    data = TracesData()
    ids = [os.urandom(16) for _ in range(3)]
    for process in ("one", "two"):
        resource = data.resource_spans.add()
        resource.resource.attributes.add(key="service.name").value.string_value = process
        for _ in range(2):
            made = resource.scope_spans.add().spans
            for trace_id in ids:
                made.add(trace_id=trace_id, span_id=os.urandom(8), name=process)
    assert service.post("traces", data.SerializeToString()).status_code == 200
    for trace_id in ids:
        found = store.trace_records(trace_id.hex()).spans
        assert sorted(span.process.service for span in found) == ["one", "one", "two", "two"]
        assert store.trace(trace_id.hex()).processes == 2


def test_sample_text_is_never_kept(service, store, tmp_path):
    secret = "what the user wrote to the model"
    for data in (
        log("other.event", secret),
        log("", secret),
        log(body=secret),
        log("dataplane.claimed", json.dumps({"text": secret})),
        log("dataplane.read"),
    ):
        answer = service.post("logs", data.SerializeToString())
        assert secret.encode() not in answer.content
    totals = store.totals()
    assert (totals.events, totals.ignored, totals.refused) == (1, 2, 2)
    store.close()
    kept = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert b"dataplane.read" in kept
    assert secret.encode() not in kept


@pytest.mark.parametrize("body", ["not json", '"a"', "null", '{"a": 1}', '["a", 1]', "[" * 9_999])
def test_an_event_whose_ids_cannot_be_read_is_refused_and_clears_nothing(service, store, body):
    facts = {"dataplane.partition": "train", "dataplane.fields": "x"}
    service.post("logs", log(body='["a", "b"]', **facts).SerializeToString())
    waiting = {"dataplane.wait": "w", "dataplane.task": "train"} | facts
    service.post("logs", log("dataplane.waiting", "[]", **waiting).SerializeToString())
    data = log("dataplane.cleared", body, **facts)
    data.MergeFrom(log("dataplane.cleared", "", **facts))
    data.resource_logs[1].scope_logs[0].log_records[0].body.int_value = 7
    answer = service.post("logs", data.SerializeToString())
    told = ExportLogsServiceResponse.FromString(answer.content).partial_success
    assert told.rejected_log_records == 2
    assert "its body is no" in told.error_message
    [wait] = why(store.wait_records(), 1 << 62)
    assert wait.there == 2


@pytest.mark.parametrize("body", [None, "", "[]", " [ ] "])
def test_a_clear_that_names_nothing_clears_the_whole_partition(service, store, body):
    facts = {"dataplane.partition": "train"}
    service.post("logs", log(body='["a", "b"]', **facts).SerializeToString())
    waiting = {"dataplane.wait": "w"} | facts
    service.post("logs", log("dataplane.waiting", "[]", **waiting).SerializeToString())
    data = log("dataplane.cleared", body or "", **facts)
    if body is None:
        data.resource_logs[0].scope_logs[0].log_records[0].ClearField("body")
    data.resource_logs[0].scope_logs[0].log_records[0].time_unix_nano += 1
    service.post("logs", data.SerializeToString())
    [wait] = why(store.wait_records(), 1 << 62)
    assert wait.there == 0


def test_events_that_name_too_much_are_refused_one_by_one(store):
    service = Service(store, Limits(ids=2, id_bytes=10))
    data = log(body='["a", "b", "c"]')
    for body in ('["%s"]' % ("x" * 11), '["\\ud800", "\\u0000"]'):
        data.MergeFrom(log(body=body))
    answer = service.post("logs", data.SerializeToString())
    told = ExportLogsServiceResponse.FromString(answer.content).partial_success
    assert told.rejected_log_records == 2
    assert "names more than 2 samples" in told.error_message
    assert [row.sample_id for row in store.find_samples("")] == ["\0", "\ud800"]


def test_the_newest_values_of_metrics_are_kept(service, store):
    data = MetricsData()
    resource = data.resource_metrics.add()
    resource.resource.attributes.add(key="service.name").value.string_value = "policy"
    metrics = resource.scope_metrics.add().metrics
    gauge = metrics.add(name="dataplane.ready", unit="{sample}").gauge
    gauge.data_points.add(as_int=5, time_unix_nano=1)
    gauge.data_points.add(as_double=float("nan"), time_unix_nano=(1 << 64) - 1)
    histogram = metrics.add(name="rl.staleness").histogram
    histogram.aggregation_temporality = AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE
    point = histogram.data_points.add(
        count=3, sum=4.5, bucket_counts=[1, 2], explicit_bounds=[1.0], time_unix_nano=2, max=3.0
    )
    point.attributes.add(key="task").value.string_value = "train"
    metrics.add(name="nothing")
    answer = service.post("metrics", data.SerializeToString())
    told = ExportMetricsServiceResponse.FromString(answer.content).partial_success
    assert told.rejected_data_points == 1
    ready, staleness = store.series()
    assert (ready.value, ready.unit, ready.process) == (5.0, "{sample}", "policy")
    assert staleness.attributes == {"task": "train"}
    assert staleness.histogram == {
        "count": 3,
        "sum": 4.5,
        "max": 3.0,
        "bounds": [1.0],
        "counts": [1, 2],
    }


@pytest.mark.parametrize(
    ("error", "status"), [(QueueFull("full"), 429), (StoreUnavailable("no disk"), 503)]
)
def test_a_store_that_cannot_take_it_now_says_when_to_come_again(store, error, status):
    class Refusing:
        def submit(self, batch):
            raise error

    answer = Service(Refusing(), Limits()).post("traces", spans().SerializeToString())
    assert answer.status_code == status
    assert int(answer.headers["retry-after"]) >= 1
    assert str(error).encode() in answer.content


def test_requests_are_decoded_away_from_the_event_loop(store, monkeypatch):
    seen = set()

    def decode(*args):
        seen.add(threading.current_thread().name)
        return made(*args)

    made = __import__("dataplane_admin.ingest.routes", fromlist=["x"]).batch_of_spans
    monkeypatch.setattr("dataplane_admin.ingest.routes.batch_of_spans", decode)
    Service(store, Limits()).post("traces", spans().SerializeToString())
    assert len(seen) == 1
    assert next(iter(seen)).startswith("otlp-decode")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["resourceSpans", "scopeSpans", "spans", "traceId", "spanId", "attributes", "value"]
            )
            | st.text(max_size=3),
            inner,
            max_size=3,
        )
    ),
    max_leaves=12,
)


@examples
@given(kind=st.sampled_from(["traces", "logs", "metrics"]), value=json_values)
def test_any_json_is_answered(service, kind, value):
    answer = service.post(kind, json.dumps(value).encode(), JSON)
    assert answer.status_code in (200, 400)
    answer.json()


@examples
@given(
    kind=st.sampled_from(["traces", "logs", "metrics"]),
    body=st.binary(max_size=60),
    encoding=st.sampled_from(["identity", "gzip"]),
)
def test_any_bytes_are_answered(service, kind, body, encoding):
    answer = service.post(kind, body, content_encoding=encoding)
    assert answer.status_code in (200, 400)
