"""Spans of both kinds, lean and the SDK's, in one request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import ScopeSpans
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanMessage
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import Status

from observability._setup_encoding import (
    Unusual,
    encodable,
    encoded_by_sdk,
    send_what_can_be,
    sender_of,
)
from observability._setup_spans import LeanSpan, LeanTracer


class LeanSpanExporter(SpanExporter):
    """Encodes lean spans, lets the SDK encode the others, and sends them in one request.

    Args:
        exporter: sends. One that takes no encoded request gets all spans in the SDK's form.
        leave_out: called with the number of spans that nobody can encode, and that are not sent.
    """

    def __init__(
        self, exporter: SpanExporter, leave_out: Callable[[int], object] | None = None
    ) -> None:
        self._exporter = exporter
        self._leave_out = leave_out
        self._send = sender_of(exporter)

    def export(self, spans: Sequence[ReadableSpan | LeanSpan]) -> SpanExportResult:
        """Export them."""
        if self._send is None:
            return self._exporter.export([_readable(span) for span in spans])
        request, lacking = _request(spans)
        sent = send_what_can_be(
            self._send, request, items=len(spans), lacking=lacking, leave_out=self._leave_out
        )
        return SpanExportResult.SUCCESS if sent else SpanExportResult.FAILURE

    def shutdown(self) -> None:
        """Shut the exporter down."""
        self._exporter.shutdown()


def _readable(span: ReadableSpan | LeanSpan) -> ReadableSpan:
    return span.readable() if isinstance(span, LeanSpan) else span


def _encodable(span: ReadableSpan) -> ReadableSpan:
    """A span of which the SDK can encode the name and the text of the status.

    It leaves out attributes that it cannot encode, but fails at these.
    """
    name, status = encodable(span.name), span.status
    described = encodable(status.description or "")
    if name == span.name and described == (status.description or ""):
        return span
    span = copy(span)
    span._name = name
    span._status = Status(status.status_code, described or None)
    return span


def _request(
    spans: Sequence[ReadableSpan | LeanSpan],
) -> tuple[ExportTraceServiceRequest, int]:
    """The request, and how many of the spans it lacks."""
    by_tracer: dict[LeanTracer, list[SpanMessage]] = {}
    others: list[ReadableSpan] = []
    lacking = 0
    for span in spans:
        try:
            if not isinstance(span, LeanSpan):
                raise Unusual("it is the SDK's own")
            by_tracer.setdefault(span.tracer, []).append(span.message())
        except Exception:  # noqa: BLE001  # attributes may be anything; the SDK drops what it must
            try:
                others.append(_encodable(_readable(span)))
            except Exception:  # noqa: BLE001  # its name is no text, for example
                lacking += 1
    request, failed = encoded_by_sdk(others, encode_spans, ExportTraceServiceRequest())
    for tracer, messages in by_tracer.items():
        if not messages:
            continue
        request.resource_spans.add(
            resource=tracer.resource_message,
            schema_url=tracer.resource.schema_url,
            scope_spans=[
                ScopeSpans(
                    scope=tracer.scope_message,
                    schema_url=tracer.scope.schema_url or "",
                    spans=messages,
                )
            ],
        )
    return request, lacking + failed
