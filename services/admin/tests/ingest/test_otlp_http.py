"""The receiver answers as the OTLP specification requires, and enforces its limits.

Tests of an unavailable store patch it, since it does not fail by chance.
So internals are imported.
"""

import gzip
import json
import os
import threading
import tracemalloc
import zlib

import pytest
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
from stored import stored_bytes

from dataplane_admin import Limits
from dataplane_admin.store import QueueFull, Store, StoreUnavailable

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


def spans(count=1, *, trace_id=None, name="span", attributes=()):
    data = TracesData()
    target = data.resource_spans.add().scope_spans.add().spans
    for _ in range(count):
        span = target.add(
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


def test_protobuf_is_answered_in_protobuf_after_the_commit(job):
    answer = job.post("traces", spans(3).SerializeToString())
    assert (answer.status_code, answer.headers["content-type"]) == (200, PROTOBUF)
    assert not ExportTraceServiceResponse.FromString(answer.content).HasField("partial_success")
    assert job.counts()["spans"] == 3


def test_the_json_example_of_the_specification_is_accepted(job):
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
    answer = job.post("traces", json.dumps(body).encode(), "application/json; charset=utf-8")
    assert (answer.status_code, answer.json()) == (200, {})
    assert answer.headers["content-type"] == JSON
    trace = job.get("trace", id=TRACE)
    [row] = trace["rows"]
    assert (row["span_id"], row["parent_id"]) == ("eee19b7ec3c1b174", "eee19b7ec3c1b173")
    assert (row["kind"], row["outcome"], row["seconds"]) == ("server", "error", 1.0)
    assert row["attributes"] == {"my.span.attr": "some value", "rl.step": 7}
    assert trace["step"] == 7


@pytest.mark.parametrize("members", [1, 3])
def test_gzip_of_one_or_several_members_is_inflated(job, members):
    body = spans(30).SerializeToString()
    cut = len(body) // members + 1
    packed = b"".join(gzip.compress(body[at : at + cut]) for at in range(0, len(body), cut))
    assert job.post("traces", packed, content_encoding="gzip").status_code == 200
    assert job.counts()["spans"] == 30


def test_a_gzip_bomb_is_refused_without_being_inflated(job_of):
    packer = zlib.compressobj(9, wbits=31)
    bomb = b"".join(packer.compress(bytes(1 << 20)) for _ in range(64)) + packer.flush()
    assert len(bomb) < 1 << 17
    small = job_of(limits=Limits(inflated_bytes=1 << 20))
    tracemalloc.start()
    try:
        answer = small.post("traces", bomb, content_encoding="gzip")
        _, maximum = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert answer.status_code == 413
    assert maximum < 16 << 20
    assert b"longer than 1048576 bytes" in answer.content


def test_a_too_long_body_is_refused_before_it_is_read(job_of):
    job = job_of(limits=Limits(body_bytes=1000))
    body = spans(100).SerializeToString()
    assert job.post("traces", body).status_code == 413

    parts = (body[at : at + 100] for at in range(0, len(body), 100))
    assert job.post("traces", parts).status_code == 413
    assert job.counts()["spans"] == 0


def test_bytes_being_read_at_once_are_bounded(job_of):
    job = job_of(limits=Limits(waiting_bytes=500))
    answer = job.post("traces", spans(50).SerializeToString())
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1
    assert job.post("traces", spans(1).SerializeToString()).status_code == 200


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
    # Names, not the bodies: gzip's contains the time, so test ids would differ between workers.
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
def test_a_refused_request_has_an_rpc_status(job, body, content, encoding, status):
    headers = {"content_encoding": encoding} if encoding else {}
    answer = job.post("traces", body, content, **headers)
    assert answer.status_code == status
    if content == JSON:
        assert set(answer.json()) == {"code", "message"}
        assert answer.json()["message"]
    else:
        assert answer.headers["content-type"] == PROTOBUF
        assert answer.content[:2] == b"\x08\x03"
    assert job.counts()["traces"] == 0


def test_rejected_spans_are_counted_and_the_others_stored(job_of):
    job = job_of(limits=Limits(spans=3))
    data = spans(5, trace_id=bytes.fromhex(TRACE))
    wrong = data.resource_spans[0].scope_spans[0].spans
    wrong.add(trace_id=b"short", span_id=b"x" * 8)
    wrong.add(trace_id=bytes(16), span_id=b"x" * 8)
    body = data.SerializeToString()
    for _ in range(2):  # a retry gets the same answer and changes nothing
        answer = job.post("traces", body)
        partial = ExportTraceServiceResponse.FromString(answer.content).partial_success
        assert (answer.status_code, partial.rejected_spans) == (200, 4)
        assert "more than 3 in a request" in partial.error_message
        trace = job.get("trace", id=TRACE)
        assert (trace["spans"], trace["rejected"], len(trace["rows"])) == (3, 2, 3)


def test_attributes_are_cut_to_the_limits(job_of):
    job = job_of(limits=Limits(attributes=2, attribute_length=10, links=1))
    data = spans(1, attributes=[("a", "x" * 11), ("b", "é" * 20), ("c", "gone")])
    data.resource_spans[0].scope_spans[0].spans[0].trace_id = bytes.fromhex(TRACE)
    span = data.resource_spans[0].scope_spans[0].spans[0]
    span.attributes[1].value.array_value.values.add(string_value="y" * 30)
    span.links.add(trace_id=b"1" * 16, span_id=b"2" * 8)
    span.links.add(trace_id=b"3" * 16, span_id=b"4" * 8)
    assert job.post("traces", data.SerializeToString()).status_code == 200
    [row] = job.get("trace", id=TRACE)["rows"]
    assert row["attributes"] == {"a": "x" * 10, "b": ["y" * 10]}
    assert len(row["links"]) == 1


def test_several_traces_of_a_request_are_separated(job):
    data = TracesData()
    ids = [os.urandom(16) for _ in range(3)]
    for process in ("one", "two"):
        resource = data.resource_spans.add()
        resource.resource.attributes.add(key="service.name").value.string_value = process
        for _ in range(2):
            spans_of_process = resource.scope_spans.add().spans
            for trace_id in ids:
                spans_of_process.add(trace_id=trace_id, span_id=os.urandom(8), name=process)
    assert job.post("traces", data.SerializeToString()).status_code == 200
    for trace_id in ids:
        trace = job.trace(trace_id)
        assert sorted(row["process"] for row in trace["rows"]) == ["one", "one", "two", "two"]
        assert trace["processes"] == 2


def test_sample_text_is_never_stored(job, tmp_path):
    secret = "what the user wrote to the model"
    for data in (
        log("other.event", secret),
        log("", secret),
        log(body=secret),
        log("dataplane.claimed", json.dumps({"text": secret})),
        log("dataplane.read"),
    ):
        answer = job.post("logs", data.SerializeToString())
        assert secret.encode() not in answer.content
    totals = job.counts()
    assert [totals[name] for name in ("events", "ignored", "refused")] == [1, 2, 2]
    job.app.state.store.close()
    stored = stored_bytes(tmp_path)
    assert b"dataplane.read" in stored
    assert secret.encode() not in stored


@pytest.mark.parametrize("body", ["not json", '"a"', "null", '{"a": 1}', '["a", 1]', "[" * 9_999])
def test_an_event_with_unreadable_ids_is_rejected(job, body):
    facts = {"dataplane.partition": "train", "dataplane.fields": "x"}
    job.post("logs", log(body='["a", "b"]', **facts).SerializeToString())
    waiting = {"dataplane.wait": "w", "dataplane.task": "train"} | facts
    job.post("logs", log("dataplane.waiting", "[]", **waiting).SerializeToString())
    data = log("dataplane.cleared", body, **facts)
    data.MergeFrom(log("dataplane.cleared", "", **facts))
    data.resource_logs[1].scope_logs[0].log_records[0].body.int_value = 7
    answer = job.post("logs", data.SerializeToString())
    partial = ExportLogsServiceResponse.FromString(answer.content).partial_success
    assert partial.rejected_log_records == 2
    assert "the body is not" in partial.error_message
    assert job.get("why")[0]["present"] == 2


@pytest.mark.parametrize("body", [None, "", "[]", " [ ] "])
def test_a_clear_without_ids_clears_the_partition(job, body):
    facts = {"dataplane.partition": "train"}
    job.post("logs", log(body='["a", "b"]', **facts).SerializeToString())
    waiting = {"dataplane.wait": "w"} | facts
    job.post("logs", log("dataplane.waiting", "[]", **waiting).SerializeToString())
    data = log("dataplane.cleared", body or "", **facts)
    if body is None:
        data.resource_logs[0].scope_logs[0].log_records[0].ClearField("body")
    data.resource_logs[0].scope_logs[0].log_records[0].time_unix_nano += 1
    job.post("logs", data.SerializeToString())
    assert job.get("why")[0]["present"] == 0


def test_events_above_the_limits_are_rejected_one_by_one(job_of):
    job = job_of(limits=Limits(ids=2, id_bytes=10))
    data = log(body='["a", "b", "c"]')
    for body in ('["%s"]' % ("x" * 11), '["\\ud800", "\\u0000"]'):
        data.MergeFrom(log(body=body))
    answer = job.post("logs", data.SerializeToString())
    partial = ExportLogsServiceResponse.FromString(answer.content).partial_success
    assert partial.rejected_log_records == 2
    assert "the record has more than 2 samples" in partial.error_message
    hits = job.get("samples")["samples"]
    assert [hit["sample_id"] for hit in hits] == ["\0", "\\ud800"]


def test_the_newest_values_of_metrics_are_stored(job):
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
    answer = job.post("metrics", data.SerializeToString())
    partial = ExportMetricsServiceResponse.FromString(answer.content).partial_success
    assert partial.rejected_data_points == 1
    ready, staleness = job.get("series")
    assert (ready["value"], ready["unit"], ready["process"]) == (5.0, "{sample}", "policy")
    assert staleness["attributes"] == {"task": "train"}
    assert staleness["histogram"] == {
        "count": 3,
        "sum": 4.5,
        "max": 3.0,
        "bounds": [1.0],
        "counts": [1, 2],
    }


@pytest.mark.parametrize(
    ("error", "status"), [(QueueFull("full"), 429), (StoreUnavailable("no disk"), 503)]
)
def test_an_unavailable_store_says_when_to_retry(job, monkeypatch, error, status):
    def refuse(self, batch):
        raise error

    monkeypatch.setattr(Store, "submit", refuse)
    answer = job.post("traces", spans().SerializeToString())
    assert answer.status_code == status
    assert int(answer.headers["retry-after"]) >= 1
    assert str(error).encode() in answer.content


def test_requests_are_decoded_outside_the_event_loop(job, monkeypatch):
    seen = set()

    def inflate(body, *_):
        seen.add(threading.current_thread().name)
        return body

    monkeypatch.setattr("dataplane_admin.ingest.routes.inflate", inflate)
    job.post("traces", spans().SerializeToString())
    assert [name.startswith("otlp-decode") for name in seen] == [True]


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
def test_any_json_is_answered(job, kind, value):
    answer = job.post(kind, json.dumps(value).encode(), JSON)
    assert answer.status_code in (200, 400)
    answer.json()


@examples
@given(
    kind=st.sampled_from(["traces", "logs", "metrics"]),
    body=st.binary(max_size=60),
    encoding=st.sampled_from(["identity", "gzip"]),
)
def test_any_bytes_are_answered(job, kind, body, encoding):
    answer = job.post(kind, body, content_encoding=encoding)
    assert answer.status_code in (200, 400)
