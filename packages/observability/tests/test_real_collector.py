"""Exports of a process, decoded by OpenTelemetry's own service definitions.

These tests use neither `Receiver` nor `records`: these could have the same error as the export.
"""

from __future__ import annotations

import gzip
import os
from dataclasses import dataclass
from typing import Any

import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from setup_processes import collector, run_script, status

SCRIPT = """
from opentelemetry._logs import SeverityNumber
from opentelemetry.trace import Link, SpanKind, Status, StatusCode

telemetry = setup(
    "grpo.driver", instance="0", run_id="run-1", endpoint=ENDPOINT, attributes={"team": "rl"}
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
for n_bytes in (40, 2):
    meter.create_counter("dataplane.io", "By", "moved").add(n_bytes, {"dataplane.direction": "put"})
telemetry.shutdown()
report(pid=os.getpid(), counts=telemetry.counts())
"""


REQUESTS: dict[str, Any] = {
    "/v1/traces": ExportTraceServiceRequest,
    "/v1/logs": ExportLogsServiceRequest,
    "/v1/metrics": ExportMetricsServiceRequest,
}


@dataclass
class Run:
    """Received resources by path, and what the process reported."""

    resources: dict[str, list[Any]]
    report: dict[str, Any]

    def items(self, path: str) -> list[Any]:
        """Return the spans, records or metrics that were posted to a path."""
        scopes, items = {
            "/v1/traces": ("scope_spans", "spans"),
            "/v1/logs": ("scope_logs", "log_records"),
            "/v1/metrics": ("scope_metrics", "metrics"),
        }[path]
        return [
            item
            for resource in self.resources[path]
            for scope in getattr(resource, scopes)
            for item in getattr(scope, items)
        ]

    def span(self, name: str) -> Span:
        [span] = [span for span in self.items("/v1/traces") if span.name == name]
        return span


@pytest.fixture(scope="module", params=["identity", "gzip"])
def run(request: pytest.FixtureRequest) -> Run:
    compression = "none" if request.param == "identity" else request.param
    with collector(status(200)) as server:
        result = run_script(
            SCRIPT,
            server.endpoint,
            OTEL_EXPORTER_OTLP_COMPRESSION=compression,
            OTEL_EXPORTER_OTLP_HEADERS="x-token=secret",
        )
    resources: dict[str, list[Any]] = {path: [] for path in REQUESTS}
    for (path, headers), body in zip(server.requests, server.bodies, strict=True):
        assert headers["content-type"] == "application/x-protobuf"
        assert headers["x-token"] == "secret"
        assert headers.get("content-encoding", "identity") == request.param
        message = REQUESTS[path].FromString(
            gzip.decompress(body) if request.param == "gzip" else body
        )
        [(_, sent)] = message.ListFields()
        resources[path] += sent
    return Run(resources, result.reports[0])


def decoded(pairs: Any) -> dict[str, Any]:
    def value(any_value: Any) -> Any:
        kind = any_value.WhichOneof("value")
        if kind == "array_value":
            return [value(each) for each in any_value.array_value.values]
        return getattr(any_value, kind)

    return {pair.key: value(pair.value) for pair in pairs}


def test_the_span_tree_arrives(run: Run) -> None:
    step, put, claim = map(run.span, ("grpo.step", "send train", "receive train"))
    assert step.parent_span_id == b""
    assert put.parent_span_id == claim.parent_span_id == step.span_id
    assert put.trace_id == claim.trace_id == step.trace_id
    assert run.span("clear").trace_id != step.trace_id
    assert step.start_time_unix_nano <= put.start_time_unix_nano <= put.end_time_unix_nano
    assert put.end_time_unix_nano <= step.end_time_unix_nano
    assert (put.kind, claim.kind) == (Span.SPAN_KIND_PRODUCER, Span.SPAN_KIND_CLIENT)


def test_attributes_have_their_types_and_include_baggage(run: Run) -> None:
    assert decoded(run.span("send train").attributes) == {
        "messaging.system": "dataplane",
        "messaging.batch.message_count": 128,
        "dataplane.fields": ["tokens", "logprobs"],
        "dataplane.bytes": 2**40,
        "share": 0.25,
        "first": True,
        "rl.step": 3,
    }
    assert decoded(run.span("clear").attributes) == {"rl.step": 3}


def test_links_and_failures_arrive(run: Run) -> None:
    put, claim = map(run.span, ("send train", "receive train"))
    [link] = claim.links
    assert (link.trace_id, link.span_id) == (put.trace_id, put.span_id)
    assert decoded(link.attributes) == {"n": 1}
    assert (claim.status.code, claim.status.message) == (Status.STATUS_CODE_ERROR, "lost")


def test_a_lifecycle_event_arrives_with_its_span(run: Run) -> None:
    [record], put = run.items("/v1/logs"), run.span("send train")
    assert record.event_name == "dataplane.put"
    assert [item.string_value for item in record.body.array_value.values] == ["s0", "s1"]
    assert decoded(record.attributes) == {"dataplane.partition": "train", "dataplane.samples": 2}
    assert record.time_unix_nano == 1_700_000_000_000_000_001
    assert (record.trace_id, record.span_id) == (put.trace_id, put.span_id)


def test_metrics_arrive(run: Run) -> None:
    [moved] = [metric for metric in run.items("/v1/metrics") if metric.name == "dataplane.io"]
    [point] = moved.sum.data_points
    assert (moved.unit, moved.description, moved.sum.is_monotonic) == ("By", "moved", True)
    assert (point.as_int, decoded(point.attributes)) == (42, {"dataplane.direction": "put"})


def test_every_signal_has_the_resource_of_its_process(run: Run) -> None:
    for resources in run.resources.values():
        for each in resources:
            facts = decoded(each.resource.attributes)
            assert facts.pop("telemetry.sdk.version")
            assert facts == {
                "service.name": "grpo.driver",
                "service.instance.id": "0",
                "host.name": os.uname().nodename,
                "process.pid": run.report["pid"],
                "rl.run_id": "run-1",
                "team": "rl",
                "telemetry.sdk.language": "python",
                "telemetry.sdk.name": "opentelemetry",
            }
    [scope] = [scope.scope for each in run.resources["/v1/logs"] for scope in each.scope_logs]
    assert (scope.name, scope.version) == ("dataplane", "1.2")


def test_counts_of_the_process_equal_what_arrived(run: Run) -> None:
    counts = run.report["counts"]
    assert len(run.items("/v1/traces")) == 4
    assert [counts[each]["exported"] for each in ("spans", "events", "metrics")] == [4, 1, 1]
    assert all(each["dropped"] == 0 for each in counts.values())
