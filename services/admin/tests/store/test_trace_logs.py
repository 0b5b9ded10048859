"""Log records of traces: stored up to a limit, text only on request."""

import json
import os
import re

import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse
from opentelemetry.proto.logs.v1.logs_pb2 import LogsData
from stored import stored_bytes

from dataplane_admin import Limits

SECRET = "what the user said"
MAX_LOGS = 1_000
MAX_BODY = 4_096
KEEP = {"keep_sample_text": True}


def logs(otlp, trace_id, *bodies, span_id=b"", severity=9, at_s=1.0, **attributes):
    """Return a request with a log record for each body."""
    data = LogsData()
    resource = data.resource_logs.add()
    resource.resource.attributes.add(key="service.name").value.string_value = "agent"
    scope = resource.scope_logs.add()
    scope.scope.name = "agent.loop"
    for place, body in enumerate(bodies):
        record = scope.log_records.add(
            trace_id=trace_id,
            span_id=span_id,
            severity_number=severity,
            time_unix_nano=otlp.start_ns + int(at_s * 1e9) + place,
        )
        record.body.string_value = body
        for key, value in attributes.items():
            record.attributes.add(key=key.replace("__", ".")).value.string_value = value
    return data


def stored(job, trace_id):
    return job.trace(trace_id)["logs"]


@pytest.fixture
def trace_id():
    return os.urandom(16)


def test_a_log_is_shown_with_its_span(url, job_of, otlp, trace_id):
    job, span_id = job_of(store_url=url, **KEEP), os.urandom(8)
    job.send(
        logs(otlp, trace_id, "retry 2", span_id=span_id, severity=17, code__function__name="ask"),
        otlp.trace(trace_id, span_id=span_id),
    )
    [log] = stored(job, trace_id)
    assert (log["body"], log["severity"], log["span_id"]) == ("retry 2", "ERROR", span_id.hex())
    assert (log["process"], log["scope"], log["time_s"]) == ("agent", "agent.loop", 1.0)
    assert log["attributes"] == {"code.function.name": "ask"}


def test_logs_before_the_first_span_of_their_trace_are_stored(url, job_of, otlp, trace_id):
    job = job_of(store_url=url, **KEEP)
    job.send(logs(otlp, trace_id, "b", at_s=2), logs(otlp, trace_id, "a"))
    job.send(otlp.trace(trace_id))
    assert [log["body"] for log in stored(job, trace_id)] == ["a", "b"]


def test_a_log_outside_of_a_trace_is_ignored(job, otlp):
    job.send(logs(otlp, b"", "x"))
    assert job.counts()["ignored"] == 1


def test_text_of_a_log_is_stored_only_on_request(job_of, otlp, trace_id, tmp_path):
    job = job_of()
    data = logs(otlp, trace_id, SECRET, SECRET, gen_ai__prompt=SECRET, code__file__path="a.py")
    first, second = data.resource_logs[0].scope_logs[0].log_records
    first.body.kvlist_value.values.add(key="text").value.string_value = SECRET
    second.body.bytes_value = SECRET.encode()
    job.send(data, logs(otlp, trace_id, "", at_s=2), otlp.trace(trace_id))
    kept = stored(job, trace_id)
    assert [log["body"] for log in kept] == ["", "", ""]
    assert kept[0]["attributes"] == {"code.file.path": "a.py"}
    job.app.state.store.close()
    assert b"a.py" in stored_bytes(tmp_path)
    assert SECRET.encode() not in stored_bytes(tmp_path)


def test_a_log_is_redacted_before_it_is_cut(job_of, otlp, trace_id):
    job = job_of(redact=(re.compile(r"sk-\w+"),), **KEEP)
    data = logs(otlp, trace_id, "x" * (MAX_BODY - 5) + " sk-abcdef", "", "", note="sk-abc")
    _, nested, raw = data.resource_logs[0].scope_logs[0].log_records
    nested.body.kvlist_value.values.add(key="key").value.string_value = "sk-é"
    raw.body.bytes_value = b"\xff sk-\xc3\xa9"
    job.send(data, otlp.trace(trace_id))
    long, short, binary = stored(job, trace_id)
    assert binary["body"] == "\"b'\\\\xff [redacted]'\""
    assert long["body"].endswith(" [red")
    assert short["body"] == '{"key": "[redacted]"}'
    assert long["attributes"] == {"note": "[redacted]"}
    assert "sk-" not in json.dumps([long, short])


def test_a_log_sent_twice_is_stored_once(url, job_of, otlp, trace_id):
    job = job_of(store_url=url, **KEEP)
    for bodies in (("a", "b"), ("a", "b", "c"), ("a",)):
        job.send(logs(otlp, trace_id, *bodies))
    job.send(otlp.trace(trace_id))
    assert [log["body"] for log in stored(job, trace_id)] == ["a", "b", "c"]


def test_logs_of_a_trace_are_stored_up_to_a_limit(url, job_of, otlp, trace_id):
    job, other = job_of(store_url=url, **KEEP), os.urandom(16)
    bodies = [str(number) for number in range(MAX_LOGS + 5)]
    for part in (bodies[: MAX_LOGS - 1], bodies):
        job.send(logs(otlp, trace_id, *part))
    job.send(logs(otlp, other, "x"), otlp.trace(trace_id), otlp.trace(other))
    full = job.trace(trace_id)
    assert [log["body"] for log in full["logs"]] == bodies[:MAX_LOGS]
    assert (full["logs_full"], job.trace(other)["logs_full"]) == (True, False)
    assert [log["body"] for log in stored(job, other)] == ["x"]


def test_logs_of_a_trace_are_bounded_in_bytes(job_of, otlp, trace_id):
    job = job_of(**KEEP)
    for number in range(5):
        bodies = [os.urandom(MAX_BODY // 2).hex() for _ in range(100)]
        job.send(logs(otlp, trace_id, *bodies, at_s=number))
    job.send(otlp.trace(trace_id))
    full = job.trace(trace_id)
    assert full["logs_full"]
    # A random hexadecimal body is compressed to half its size.
    assert (1 << 20) // MAX_BODY < len(full["logs"]) < (1 << 20) // (MAX_BODY // 2) + 10


def test_a_too_long_log_is_rejected_and_others_are_not(job_of, otlp, trace_id):
    job = job_of(limits=Limits(attribute_length=100_000), **KEEP)
    answer = job.post("logs", logs(otlp, trace_id, "x" * 70_000, "y").SerializeToString())
    partial = ExportLogsServiceResponse.FromString(answer.content).partial_success
    assert partial.rejected_log_records == 1
    assert "expected at most 65536" in partial.error_message
    job.send(otlp.trace(trace_id))
    assert [log["body"] for log in stored(job, trace_id)] == ["y"]
