"""Any well-formed export request is accepted and can be shown.

Requests are generated from the descriptors of the protobuf messages: every field of every message,
with the extreme values of its type.
"""

import json
import math
import os

import pytest
from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor as Field
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.proto.logs.v1.logs_pb2 import LogsData
from opentelemetry.proto.metrics.v1.metrics_pb2 import MetricsData
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

from dataplane_admin import Limits

PROTOBUF, JSON = "application/x-protobuf", "application/json"
KINDS = {
    "traces": (TracesData, ExportTraceServiceResponse),
    "logs": (LogsData, ExportLogsServiceResponse),
    "metrics": (MetricsData, ExportMetricsServiceResponse),
}
WRONG = "\ue000"  # in place of invalid UTF-8 or a lone surrogate
NAMES = ["rl.run_id", "rl.step", "rl.bucket", "service.name", "process.pid", "host.name"]
NAMES += ["dataplane.wait", "dataplane.partition", "dataplane.samples", "dataplane.since_ns"]
EVENTS = ["dataplane.put", "dataplane.waiting", "dataplane.cleared", "dataplane.trained"]
TEXTS = ["", "\0", WRONG, "7", "\U0010ffff", "x" * 5_000, '["a"]', *NAMES, *EVENTS]
DEEPEST = 9
HERE = "http://localhost"


def integers(bits, *, signed):
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    special = {low, low + 1, -1, 0, 1, 7, (1 << 31) - 1, (1 << 63) - 1, (1 << 63), high - 1, high}
    return st.sampled_from(sorted(number for number in special if low <= number <= high))


DOUBLES = [0.0, -0.0, 1.5, 5e-324, 1.7e308, -1.7e308, math.inf, -math.inf, math.nan]
IDS = [b"", bytes(8), bytes(16), b"\xff" * 8, b"t" * 16, b"x" * 99]
VALUES = {
    Field.TYPE_DOUBLE: st.sampled_from(DOUBLES),
    Field.TYPE_FLOAT: st.sampled_from(DOUBLES[:4]),
    Field.TYPE_BOOL: st.booleans(),
    Field.TYPE_STRING: st.sampled_from(TEXTS),
    Field.TYPE_BYTES: st.sampled_from(IDS),
    Field.TYPE_ENUM: integers(32, signed=True),
    **dict.fromkeys(
        [Field.TYPE_INT32, Field.TYPE_SINT32, Field.TYPE_SFIXED32], integers(32, signed=True)
    ),
    **dict.fromkeys([Field.TYPE_UINT32, Field.TYPE_FIXED32], integers(32, signed=False)),
    **dict.fromkeys(
        [Field.TYPE_INT64, Field.TYPE_SINT64, Field.TYPE_SFIXED64], integers(64, signed=True)
    ),
    **dict.fromkeys([Field.TYPE_UINT64, Field.TYPE_FIXED64], integers(64, signed=False)),
}


def fill(draw, message, depth=0):
    """Set random fields of a message, nested ones more often."""
    for field in message.DESCRIPTOR.fields:
        is_message = field.type == Field.TYPE_MESSAGE
        if depth > DEEPEST and is_message:
            continue
        likely = 3 if is_message and depth < 3 else 1
        count = draw(st.sampled_from([0, *[1] * likely]))
        if not count:
            continue
        if field.is_repeated:
            for _ in range(draw(st.integers(1, 2))):
                held = getattr(message, field.name)
                if is_message:
                    fill(draw, held.add(), depth + 1)
                else:
                    held.append(draw(VALUES[field.type]))
        elif is_message:
            inner = getattr(message, field.name)
            inner.SetInParent()
            fill(draw, inner, depth + 1)
        else:
            setattr(message, field.name, draw(VALUES[field.type]))


@st.composite
def requests(draw, kind):
    message = KINDS[kind][0]()
    fill(draw, message)
    return message


def with_good_spans(message):
    """Add a valid span at each end of a request; return it with their trace ids."""
    data, ids = TracesData(), [os.urandom(16), os.urandom(16)]
    for trace_id in ids:
        if trace_id == ids[1]:
            data.MergeFrom(message)
        data.resource_spans.add().scope_spans.add().spans.add(
            trace_id=trace_id, span_id=b"12345678", start_time_unix_nano=1, end_time_unix_nano=2
        )
    return data, ids


def encode(message, content):
    if content == PROTOBUF:
        return message.SerializeToString().replace(WRONG.encode(), b"\xff\xfe\xfd")
    data = json_format.MessageToDict(message)
    return json.dumps(_with_hexadecimal_ids(message, data)).replace("\\ue000", "\\ud800").encode()


def _with_hexadecimal_ids(message, data):
    for field, value in message.ListFields():
        name = field.json_name
        if field.type == Field.TYPE_MESSAGE:
            pairs = (
                zip(value, data[name], strict=True) if field.is_repeated else [(value, data[name])]
            )
            for inner, held in pairs:
                _with_hexadecimal_ids(inner, held)
        elif field.type == Field.TYPE_BYTES and field.name.endswith("_id"):
            data[name] = value.hex()
    return data


def shown(job):
    """Return the status of every page and answer that shows the records, by path."""
    paths = ["/", "/traces", "/metrics"]
    paths += [f"/api/v1/{name}" for name in ("traces", "runs", "series", "why", "status")]
    for trace in job.get("traces", limit=5)["traces"]:
        if trace["spans"]:  # else all were rejected, and 404 says so
            paths += [f"{path}?id={trace['trace_id']}" for path in ("/trace", "/api/v1/trace")]
    return {path: job.client.get(path).status_code for path in paths}


examples = settings(
    max_examples=30,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.mark.parametrize("content", [PROTOBUF, JSON])
@pytest.mark.parametrize("kind", KINDS)
def test_any_request_is_accepted_and_shown(url, job_of, kind, content):
    # Small limits, so that many requests are cut.
    job = job_of(store_url=url, limits=Limits(attributes=1, attribute_length=16, links=1))

    @examples
    @given(message=requests(kind))
    def taken(message):
        good = []
        if kind == "traces":
            message, good = with_good_spans(message)
        answer = job.post(kind, encode(message, content), content)
        assert answer.status_code == 200, answer.content
        if content == PROTOBUF:
            KINDS[kind][1].FromString(answer.content)
        else:
            answer.json()
        for trace_id in good:
            assert len(job.trace(trace_id)["rows"]) == 1

    taken()
    assert set(shown(job).values()) == {200}


def test_an_invalid_string_is_replaced_and_its_span_stored(job):
    good = TracesData()
    resource = good.resource_spans.add()
    for key in ("service.name", "rl.run_id"):
        resource.resource.attributes.add(key=key).value.string_value = f"a{WRONG}b"
    resource.scope_spans.add().spans.add(trace_id=b"t" * 16, span_id=b"s" * 8, name=WRONG)
    for content in (PROTOBUF, JSON):
        assert job.post("traces", encode(good, content), content).status_code == 200
    assert set(job.trace(b"t" * 16)["name"]) == {"\N{REPLACEMENT CHARACTER}"}
    assert job.get("runs")["runs"][0]["run_id"].strip("ab") != ""


def test_unknown_json_names_are_ignored(job):
    span = {"traceId": "74" * 16, "spanId": "73" * 8, "spanIds": ["zz"], "attributes": []}
    unknown = {"traceId": "no hex", "spanId": 7, "deep": {"parentSpanId": "zz"}}
    body = {
        "resourceSpans": [{"scopeSpans": [{"spans": [span], **unknown}], "resource": unknown}],
        **unknown,
    }
    assert job.post("traces", json.dumps(body).encode(), JSON).json() == {}
    assert job.counts()["spans"] == 1


def test_an_id_that_is_not_hexadecimal_rejects_only_its_span(job):
    spans = [{"traceId": "74" * 16, "spanId": place * 8} for place in ("71", "72", "zz")]
    spans.append({"traceId": "74" * 16, "spanId": "75" * 8, "parentSpanId": "no"})
    body = json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}).encode()
    partial = job.post("traces", body, JSON).json()["partialSuccess"]
    assert partial["rejectedSpans"] == "2"
    assert "span id is all zero or not 8 bytes" in partial["errorMessage"]
    assert job.counts()["spans"] == 2


@pytest.mark.parametrize("content", [PROTOBUF, JSON])
def test_a_time_after_2262_is_named_as_the_reason(job, content):
    message, good = with_good_spans(TracesData())
    late = message.resource_spans.add().scope_spans.add().spans
    late.add(trace_id=b"t" * 16, span_id=b"s" * 8, end_time_unix_nano=2**63)
    assert b"after the year 2262" in job.post("traces", encode(message, content), content).content
    logs = LogsData()
    logs.resource_logs.add().scope_logs.add().log_records.add(
        event_name="dataplane.put", observed_time_unix_nano=2**64 - 1
    )
    assert b"after the year 2262" in job.post("logs", encode(logs, content), content).content
    metrics = MetricsData()
    gauge = metrics.resource_metrics.add().scope_metrics.add().metrics.add().gauge
    gauge.data_points.add(time_unix_nano=2**63)
    answer = job.post("metrics", encode(metrics, content), content)
    assert b"after the year 2262" in answer.content
    assert {len(job.trace(trace_id)["rows"]) for trace_id in good} == {1}
