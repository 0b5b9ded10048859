"""Answers to export requests, in the encoding that the request came in."""

from __future__ import annotations

import json
import math
from http import HTTPStatus

from google.protobuf.message import Message
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from starlette.responses import Response

from dataplane_admin.ingest.otlp_json import write_json
from dataplane_admin.ingest.refusal import Refusal

PROTOBUF = "application/x-protobuf"
JSON = "application/json"

_INVALID_ARGUMENT, _RESOURCE_EXHAUSTED, _INTERNAL, _UNAVAILABLE = 3, 8, 13, 14
_MOST_MESSAGE = 1000


def accepted(kind: str, refused: int, reasons: tuple[str, ...], media_type: str) -> Response:
    """200, with the number of what was refused and why."""
    message = "; ".join(reasons)[:_MOST_MESSAGE]
    answer: Message
    if kind == "traces":
        answer = ExportTraceServiceResponse()
        if refused:
            answer.partial_success.rejected_spans = refused
            answer.partial_success.error_message = message
    elif kind == "logs":
        answer = ExportLogsServiceResponse()
        if refused:
            answer.partial_success.rejected_log_records = refused
            answer.partial_success.error_message = message
    else:
        answer = ExportMetricsServiceResponse()
        if refused:
            answer.partial_success.rejected_data_points = refused
            answer.partial_success.error_message = message
    body = write_json(answer) if media_type == JSON else answer.SerializeToString()
    return Response(body, media_type=media_type)


def refused(refusal: Refusal, media_type: str) -> Response:
    """An error with a ``google.rpc.Status``, as the OTLP specification says."""
    status = refusal.status
    message = str(refusal)[:_MOST_MESSAGE].encode(errors="replace")
    code = {
        HTTPStatus.TOO_MANY_REQUESTS: _RESOURCE_EXHAUSTED,
        HTTPStatus.SERVICE_UNAVAILABLE: _UNAVAILABLE,
        HTTPStatus.INTERNAL_SERVER_ERROR: _INTERNAL,
    }.get(status, _INVALID_ARGUMENT)
    if media_type == JSON:
        body = json.dumps({"code": code, "message": message.decode()}).encode()
    else:
        # Two fields of it are not worth a dependency.
        body = b"\x08" + bytes([code]) + b"\x12" + _varint(len(message)) + message
    headers = {}
    if refusal.retry_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(refusal.retry_s)))
    if status is HTTPStatus.UNSUPPORTED_MEDIA_TYPE:
        headers["Accept-Encoding"] = "gzip, identity"
    return Response(body, status_code=status, media_type=media_type, headers=headers)


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)
