"""Log records that are encoded when they are emitted; `_setup_encoding` says why.

Only those told by keywords of plain values, as our lifecycle events are. All others are the SDK's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, cast  # Any: arguments of the OpenTelemetry API pass through unread

from opentelemetry import _logs
from opentelemetry import context as otel_context
from opentelemetry._logs import SeverityNumber
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.common._log_encoder import encode_logs
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope as ScopeMessage
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord as EventMessage
from opentelemetry.proto.logs.v1.logs_pb2 import ResourceLogs, ScopeLogs
from opentelemetry.proto.logs.v1.logs_pb2 import SeverityNumber as EventSeverity
from opentelemetry.proto.resource.v1.resource_pb2 import Resource as ResourceMessage
from opentelemetry.sdk._logs import (
    LoggerProvider,
    LogRecordLimits,
    LogRecordProcessor,
    ReadableLogRecord,
    ReadWriteLogRecord,
)
from opentelemetry.sdk._logs.export import LogRecordExporter, LogRecordExportResult
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import get_current_span
from opentelemetry.util.types import Attributes

from observability._setup_encoding import (
    Unusual,
    attribute_bytes,
    encodable,
    encoded_by_sdk,
    resource_message,
    scope_message,
    send_what_can_be,
    sender_of,
)


class EncodedEvent:
    """Stands for a log record in the SDK's batch processor, which copies it and reads nothing.

    Args:
        logger: which emitted it.
        message: OTLP's form of it.
    """

    instrumentation_scope: InstrumentationScope | None = None
    limits: LogRecordLimits | None = None
    context: Context | None = None

    def __init__(self, logger: LeanLogger, message: EventMessage) -> None:
        self.logger = logger
        self.message = message
        self.resource = logger.resource  # of none it would make one

    @property
    def log_record(self) -> EncodedEvent:
        """What is copied."""
        return self


class LeanLogger(_logs.Logger):
    """Encodes what is told by keywords of plain values.

    Args:
        sdk: gets all else.
        processor: gets the encoded ones.
        resource: of the process, as the SDK and as OTLP have it.
        scope: of the logger, likewise.
    """

    def __init__(
        self,
        sdk: _logs.Logger,
        processor: LogRecordProcessor,
        *,
        resource: tuple[Resource, ResourceMessage],
        scope: tuple[InstrumentationScope, ScopeMessage],
    ) -> None:
        own, message = scope
        super().__init__(own.name, own.version, own.schema_url, own.attributes)
        self._sdk = sdk
        self._processor = processor
        self.resource = resource[0]
        self._most = LogRecordLimits().max_log_record_attributes
        self.scope_logs = ScopeLogs(scope=message, schema_url=own.schema_url or "")
        self.resource_logs = ResourceLogs(resource=resource[1], schema_url=self.resource.schema_url)

    def enabled(self, **kwargs: Any) -> bool:
        """See `opentelemetry._logs.Logger`, as for all below."""
        return self._sdk.enabled(**kwargs)

    def emit(self, record: _logs.LogRecord | None = None, **kwargs: Any) -> None:
        try:
            if record is not None:
                raise Unusual("a record is the SDK's")
            message = self._message(**kwargs)
        except Exception:  # noqa: BLE001  # attributes may be anything; the SDK drops what it must
            # But for these, which it fails to encode.
            texts = {key: encodable(told) for key, told in kwargs.items() if type(told) is str}
            self._sdk.emit(*(() if record is None else (record,)), **{**kwargs, **texts})
            return
        # A batch processor reads of it what `EncodedEvent` has.
        self._processor.on_emit(cast("ReadWriteLogRecord", EncodedEvent(self, message)))

    def _message(
        self,
        *,
        event_name: str,
        timestamp: int,
        observed_timestamp: int | None,
        severity_number: SeverityNumber | None,
        body: str,
        attributes: Attributes,
        context: Context | None = None,
    ) -> EventMessage:
        """Raises a TypeError if it is told by other keywords, or by fewer."""
        found = attributes or {}
        if severity_number is None or observed_timestamp is None:
            raise Unusual("the SDK fills in what is missing")
        if type(body) is not str or (self._most is not None and len(found) > self._most):
            raise Unusual("its body is no text, or it has too many attributes")
        span = get_current_span(context or otel_context.get_current()).get_span_context()
        message = EventMessage(
            event_name=event_name,
            time_unix_nano=timestamp,
            observed_time_unix_nano=observed_timestamp,
            severity_number=cast("EventSeverity.ValueType", severity_number.value),
            body=AnyValue(string_value=body),
            flags=span.trace_flags,
        )
        if span.trace_id:
            message.trace_id = span.trace_id.to_bytes(16, "big")
        if span.span_id:
            message.span_id = span.span_id.to_bytes(8, "big")
        message.MergeFromString(attribute_bytes(EventMessage, found))
        return message


class LeanLoggerProvider(_logs.LoggerProvider):
    """Lean loggers in front of the SDK's.

    Args:
        sdk: makes those.
        processor: one of the SDK provider's; gets the events that are encoded.
        resource: of the process.
    """

    def __init__(
        self, sdk: LoggerProvider, processor: LogRecordProcessor, resource: Resource
    ) -> None:
        self._sdk = sdk
        self._processor = processor
        encoded = resource_message(resource)
        self._resource = None if encoded is None else (resource, encoded)
        # A library may ask for its logger in each call.
        self._kept = lru_cache(maxsize=256)(self._make)
        self._limited = LogRecordLimits().max_log_record_attribute_length is not None
        self.force_flush = sdk.force_flush

    def get_logger(
        self,
        name: str,
        version: str | None = None,
        schema_url: str | None = None,
        attributes: Attributes = None,
    ) -> _logs.Logger:
        """See `opentelemetry._logs.LoggerProvider`."""
        if attributes is None:
            return self._kept(name, version, schema_url)
        return self._make(name, version, schema_url, attributes)

    def _make(
        self,
        name: str,
        version: str | None,
        schema_url: str | None,
        attributes: Attributes = None,
    ) -> _logs.Logger:
        sdk = self._sdk.get_logger(name, version, schema_url, attributes)
        scope = InstrumentationScope(name, version, schema_url, attributes)
        message = scope_message(scope)
        if self._limited or self._resource is None or message is None:
            return sdk
        return LeanLogger(sdk, self._processor, resource=self._resource, scope=(scope, message))


class LeanLogExporter(LogRecordExporter):
    """Lets the SDK encode what is not encoded yet, and sends all in one request.

    Args:
        exporter: sends.
        leave_out: called with the number of records that nobody can encode, and that are not sent.
    """

    def __init__(
        self, exporter: LogRecordExporter, leave_out: Callable[[int], object] | None = None
    ) -> None:
        self._exporter = exporter
        self._leave_out = leave_out
        self._send = sender_of(exporter)

    @property
    def takes_encoded(self) -> bool:
        """Whether it can send what is encoded already; else let the SDK's loggers be used."""
        return self._send is not None

    def export(self, batch: Sequence[ReadableLogRecord]) -> LogRecordExportResult:
        """Export them."""
        if self._send is None:
            return self._exporter.export(batch)
        request, lacking = _request(batch)
        sent = send_what_can_be(
            self._send, request, items=len(batch), lacking=lacking, leave_out=self._leave_out
        )
        return LogRecordExportResult.SUCCESS if sent else LogRecordExportResult.FAILURE

    def shutdown(self) -> None:
        """Shut the exporter down."""
        self._exporter.shutdown()  # type: ignore[no-untyped-call]  # as the SDK declares it

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Nothing is kept here."""
        return True


def _request(batch: Sequence[ReadableLogRecord]) -> tuple[ExportLogsServiceRequest, int]:
    """The request, and how many of the records it lacks."""
    by_logger: dict[LeanLogger, list[EventMessage]] = {}
    others: list[ReadableLogRecord] = []
    for record in batch:
        encoded: object = record.log_record
        if isinstance(encoded, EncodedEvent):
            by_logger.setdefault(encoded.logger, []).append(encoded.message)
        else:
            others.append(record)
    request, lacking = encoded_by_sdk(others, encode_logs, ExportLogsServiceRequest())
    for logger, messages in by_logger.items():
        resource_logs = request.resource_logs.add()
        resource_logs.CopyFrom(logger.resource_logs)
        scope_logs = resource_logs.scope_logs.add()
        scope_logs.CopyFrom(logger.scope_logs)
        scope_logs.log_records.extend(messages)
    return request, lacking
