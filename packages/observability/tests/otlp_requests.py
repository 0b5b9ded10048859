"""OTLP export requests, and a function that posts them."""

from __future__ import annotations

import http.client

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from observability.receiver import Receiver

WAIT_S = 30.0
PROTOBUF = {"Content-Type": "application/x-protobuf"}


def traces(*names: str) -> bytes:
    request = ExportTraceServiceRequest()
    spans = request.resource_spans.add().scope_spans.add().spans
    for name in names:
        spans.add(trace_id=b"t" * 16, span_id=b"s" * 8, name=name)
    return request.SerializeToString()


def logs(*events: str) -> bytes:
    request = ExportLogsServiceRequest()
    records = request.resource_logs.add().scope_logs.add().log_records
    for event in events:
        records.add(event_name=f"dataplane.{event}")
    return request.SerializeToString()


def metrics() -> bytes:
    request = ExportMetricsServiceRequest()
    metric = request.resource_metrics.add().scope_metrics.add().metrics.add(name="dataplane.io")
    metric.sum.data_points.add(as_int=7)
    return request.SerializeToString()


def post(
    receiver: Receiver,
    path: str = "/v1/traces",
    body: bytes = b"",
    method: str = "POST",
    **headers: str,
) -> tuple[int, bytes, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", receiver.port, timeout=WAIT_S)
    try:
        all_headers = PROTOBUF | {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body, all_headers)
        response = connection.getresponse()
        return response.status, response.read(), dict(response.headers)
    finally:
        connection.close()
