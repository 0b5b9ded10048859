"""What leaves a process, as an endpoint made of OpenTelemetry's own service definitions reads it.

Independent of our receiver and of our records: both ends could be wrong in the same way.
"""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import (
    ExportLogsServiceRequest,
    ExportLogsServiceResponse,
)
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord, ResourceLogs
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric, ResourceMetrics
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, Span, Status

SCRIPT = """
import json, os, sys
from opentelemetry import baggage, context, metrics, trace
from opentelemetry._logs import SeverityNumber, get_logger
from opentelemetry.trace import Link, SpanKind, Status, StatusCode
from observability.setup import setup

telemetry = setup(
    "grpo.driver", instance="0", run_id="run-1", endpoint=sys.argv[1], attributes={"team": "rl"}
)
tracer = trace.get_tracer("dataplane", "1.2")
context.attach(baggage.set_baggage("rl.step", "3"))
with tracer.start_as_current_span("grpo.step"):
    with tracer.start_as_current_span(
        "send train",
        kind=SpanKind.PRODUCER,
        attributes={
            "messaging.system": "dataplane",
            "messaging.batch.message_count": 128,
            "dataplane.fields": ["tokens", "logprobs"],
            "dataplane.bytes": 2**40,
            "share": 0.25,
            "first": True,
        },
    ) as put:
        get_logger("dataplane", "1.2").emit(
            timestamp=1_700_000_000_000_000_001,
            event_name="dataplane.put",
            body=["s0", "s1"],
            severity_number=SeverityNumber.INFO,
            attributes={"dataplane.partition": "train", "dataplane.samples": 2},
        )
    with tracer.start_as_current_span(
        "receive train", kind=SpanKind.CLIENT, links=[Link(put.get_span_context(), {"n": 1})]
    ) as claim:
        claim.set_status(Status(StatusCode.ERROR, "lost"))
tracer.start_span("clear").end()
meter = metrics.get_meter("dataplane", "1.2")
meter.create_counter("dataplane.io", "By", "moved").add(40, {"dataplane.direction": "put"})
meter.create_counter("dataplane.io", "By", "moved").add(2, {"dataplane.direction": "put"})
meter.create_up_down_counter("dataplane.outstanding", "By").add(-5)
meter.create_gauge("dataplane.ready", "{sample}").set(12)
histogram = meter.create_histogram(
    "dataplane.claim.age", "s", explicit_bucket_boundaries_advisory=[1.0, 10.0]
)
for seconds in (0.5, 2.0, 3.0, 99.0):
    histogram.record(seconds, {"dataplane.task": "train"})
telemetry.shutdown()
print(json.dumps({"pid": os.getpid(), "counts": telemetry.counts()}))
"""


class Collector:
    """Answers OTLP/HTTP requests as the specification says, and keeps them."""

    _SERVICES = {  # noqa: RUF012  # read only
        "/v1/traces": (ExportTraceServiceRequest, ExportTraceServiceResponse),
        "/v1/logs": (ExportLogsServiceRequest, ExportLogsServiceResponse),
        "/v1/metrics": (ExportMetricsServiceRequest, ExportMetricsServiceResponse),
    }

    def __init__(self) -> None:
        self.spans: list[ResourceSpans] = []
        self.logs: list[ResourceLogs] = []
        self.metrics: list[ResourceMetrics] = []
        self.encodings: set[str] = set()
        kept = {"/v1/traces": self.spans, "/v1/logs": self.logs, "/v1/metrics": self.metrics}
        collector = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                assert self.headers["Content-Type"] == "application/x-protobuf"
                body = self.rfile.read(int(self.headers["Content-Length"]))
                encoding = self.headers.get("Content-Encoding", "identity")
                collector.encodings.add(encoding)
                request_type, response_type = collector._SERVICES[self.path]
                request: Any = request_type.FromString(
                    gzip.decompress(body) if encoding == "gzip" else body
                )
                [field] = request.ListFields()
                kept[self.path].extend(field[1])
                answer = response_type().SerializeToString()
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *args: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def span(self, name: str) -> Span:
        [found] = [
            span
            for resource in self.spans
            for scope in resource.scope_spans
            for span in scope.spans
            if span.name == name
        ]
        return found

    def record(self) -> LogRecord:
        [found] = [
            record
            for resource in self.logs
            for scope in resource.scope_logs
            for record in scope.log_records
        ]
        return found

    def metric(self, name: str) -> Metric:
        [found] = [
            metric
            for resource in self.metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == name
        ]
        return found


def plain(pairs: Any) -> dict[str, Any]:
    def value(any_value: Any) -> Any:
        kind = any_value.WhichOneof("value")
        if kind == "array_value":
            return [value(each) for each in any_value.array_value.values]
        return getattr(any_value, kind)

    return {pair.key: value(pair.value) for pair in pairs}


@pytest.fixture(scope="module", params=["none", "gzip"])
def run(request: pytest.FixtureRequest) -> Iterator[tuple[Collector, dict[str, Any]]]:
    collector = Collector()
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("OTEL_")}
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, collector.endpoint],
        env=inherited | {"OTEL_EXPORTER_OTLP_COMPRESSION": request.param},
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=True,
    )
    assert collector.encodings == {"identity" if request.param == "none" else "gzip"}
    yield collector, json.loads(ran.stdout)
    collector.close()


Run = tuple[Collector, dict[str, Any]]


def test_the_span_tree_arrives(run: Run) -> None:
    collector, _ = run
    step, put, claim = map(collector.span, ("grpo.step", "send train", "receive train"))
    assert step.parent_span_id == b""
    assert put.parent_span_id == claim.parent_span_id == step.span_id
    assert put.trace_id == claim.trace_id == step.trace_id
    assert collector.span("clear").trace_id != step.trace_id
    assert step.start_time_unix_nano <= put.start_time_unix_nano <= put.end_time_unix_nano
    assert put.end_time_unix_nano <= step.end_time_unix_nano
    assert (put.kind, claim.kind) == (Span.SPAN_KIND_PRODUCER, Span.SPAN_KIND_CLIENT)


def test_attributes_arrive_with_their_types_and_the_baggage_of_the_step(run: Run) -> None:
    collector, _ = run
    assert plain(collector.span("send train").attributes) == {
        "messaging.system": "dataplane",
        "messaging.batch.message_count": 128,
        "dataplane.fields": ["tokens", "logprobs"],
        "dataplane.bytes": 2**40,
        "share": 0.25,
        "first": True,
        "rl.step": 3,
    }
    assert plain(collector.span("clear").attributes) == {"rl.step": 3}


def test_links_and_failures_arrive(run: Run) -> None:
    collector, _ = run
    put, claim = map(collector.span, ("send train", "receive train"))
    [link] = claim.links
    assert (link.trace_id, link.span_id) == (put.trace_id, put.span_id)
    assert plain(link.attributes) == {"n": 1}
    assert (claim.status.code, claim.status.message) == (Status.STATUS_CODE_ERROR, "lost")


def test_a_lifecycle_event_arrives_with_its_span(run: Run) -> None:
    collector, _ = run
    record, put = collector.record(), collector.span("send train")
    assert record.event_name == "dataplane.put"
    assert [item.string_value for item in record.body.array_value.values] == ["s0", "s1"]
    assert plain(record.attributes) == {"dataplane.partition": "train", "dataplane.samples": 2}
    assert record.time_unix_nano == 1_700_000_000_000_000_001
    assert (record.trace_id, record.span_id) == (put.trace_id, put.span_id)


def test_metrics_arrive(run: Run) -> None:
    collector, _ = run
    moved = collector.metric("dataplane.io")
    [point] = moved.sum.data_points
    assert (moved.unit, moved.description, moved.sum.is_monotonic) == ("By", "moved", True)
    assert (point.as_int, plain(point.attributes)) == (42, {"dataplane.direction": "put"})
    outstanding = collector.metric("dataplane.outstanding").sum
    assert (outstanding.data_points[0].as_int, outstanding.is_monotonic) == (-5, False)
    assert collector.metric("dataplane.ready").gauge.data_points[0].as_int == 12
    [age] = collector.metric("dataplane.claim.age").histogram.data_points
    assert (age.count, age.sum, age.min, age.max) == (4, 104.5, 0.5, 99.0)
    assert (list(age.explicit_bounds), list(age.bucket_counts)) == ([1.0, 10.0], [1, 2, 1])
    assert plain(age.attributes) == {"dataplane.task": "train"}


def test_every_signal_names_the_process_it_comes_from(run: Run) -> None:
    collector, told = run
    for resources in (collector.spans, collector.logs, collector.metrics):
        for each in resources:
            facts = plain(each.resource.attributes)
            assert facts.pop("telemetry.sdk.version")
            assert facts == {
                "service.name": "grpo.driver",
                "service.instance.id": "0",
                "host.name": os.uname().nodename,
                "process.pid": told["pid"],
                "rl.run_id": "run-1",
                "team": "rl",
                "telemetry.sdk.language": "python",
                "telemetry.sdk.name": "opentelemetry",
            }
    [scope] = [scope.scope for each in collector.logs for scope in each.scope_logs]
    assert (scope.name, scope.version) == ("dataplane", "1.2")


def test_the_process_counted_what_arrived(run: Run) -> None:
    collector, told = run
    spans = sum(len(scope.spans) for each in collector.spans for scope in each.scope_spans)
    assert told["counts"]["spans"]["exported"] == spans == 4
    assert told["counts"]["events"]["exported"] == 1
    assert told["counts"]["metrics"]["exported"] == 1
    assert all(each["dropped"] == 0 for each in told["counts"].values())
