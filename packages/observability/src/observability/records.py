"""Spans and lifecycle events as they arrived over OTLP, in plain dataclasses.

Everything that looks at a run, while it goes on or afterwards, works on these: they are decoded
from the bytes of OTLP export requests and need neither an SDK nor the process that made them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias  # Any: attribute values

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanMessage
from opentelemetry.proto.trace.v1.trace_pb2 import Status

Attributes: TypeAlias = Mapping[str, Any]
Kind = Literal["unspecified", "internal", "server", "client", "producer", "consumer"]
Outcome = Literal["unset", "ok", "error"]

_KINDS: dict[int, Kind] = {
    SpanMessage.SPAN_KIND_UNSPECIFIED: "unspecified",
    SpanMessage.SPAN_KIND_INTERNAL: "internal",
    SpanMessage.SPAN_KIND_SERVER: "server",
    SpanMessage.SPAN_KIND_CLIENT: "client",
    SpanMessage.SPAN_KIND_PRODUCER: "producer",
    SpanMessage.SPAN_KIND_CONSUMER: "consumer",
}
_OUTCOMES: dict[int, Outcome] = {
    Status.STATUS_CODE_UNSET: "unset",
    Status.STATUS_CODE_OK: "ok",
    Status.STATUS_CODE_ERROR: "error",
}


@dataclass(frozen=True, order=True)
class Process:
    """Where a record comes from.

    Attributes:
        service: ``service.name``.
        instance: ``service.instance.id``, the rank for example; empty if there is one.
        host: ``host.name``.
        pid: ``process.pid``, 0 if not told.
    """

    service: str
    instance: str = ""
    host: str = ""
    pid: int = 0

    @property
    def label(self) -> str:
        """Short and unique within a run: the service and its instance."""
        return f"{self.service} {self.instance}".rstrip()


@dataclass(frozen=True)
class Link:
    """A span that another one is about."""

    trace_id: str
    span_id: str


@dataclass(frozen=True)
class Span:
    """One span.

    Attributes:
        trace_id: 32 hexadecimal digits.
        span_id: 16 hexadecimal digits.
        parent_id: the parent's ``span_id``, None of a root.
        name: what was done.
        kind: OpenTelemetry's.
        start_ns: nanoseconds since 1970, by the clock of its process.
        end_ns: as ``start_ns``.
        attributes: name to value.
        process: which made it.
        links: the spans it is about.
        outcome: "error" if it failed.
        message: why it failed.
    """

    trace_id: str
    span_id: str
    parent_id: str | None
    name: str
    kind: Kind
    start_ns: int
    end_ns: int
    attributes: Attributes
    process: Process
    links: tuple[Link, ...] = ()
    outcome: Outcome = "unset"
    message: str = ""

    @property
    def seconds(self) -> float:
        """How long it took."""
        return (self.end_ns - self.start_ns) / 1e9


@dataclass(frozen=True)
class Event:
    """One lifecycle event: what one batch operation did to samples.

    Attributes:
        name: what happened, "put" for example; see docs/telemetry.md.
        time_ns: nanoseconds since 1970, by the clock of its process.
        attributes: name to value.
        sample_ids: the samples; of a large batch one part.
        process: which made it.
        trace_id: of the span it belongs to; empty if there is none.
        span_id: as ``trace_id``.
    """

    name: str
    time_ns: int
    attributes: Attributes
    sample_ids: tuple[str, ...]
    process: Process
    trace_id: str = ""
    span_id: str = ""


@dataclass
class Records:
    """What a run told so far."""

    spans: list[Span] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def add(self, other: Records) -> None:
        """Append what another holds."""
        self.spans += other.spans
        self.events += other.events


_RUN_ID = "rl.run_id"

EVENT_PREFIX = "dataplane."
"""What the names of lifecycle events begin with in OTLP; `Event.name` is the rest."""


def decode_traces(body: bytes) -> Records:
    """The spans of an ``ExportTraceServiceRequest``.

    Raises:
        google.protobuf.message.DecodeError: ``body`` is not one.
    """
    request = ExportTraceServiceRequest.FromString(body)
    return Records(
        spans=[
            _span(span, process, run)
            for resource_spans in request.resource_spans
            for process, run in [(_process(resource_spans.resource), _run(resource_spans.resource))]
            for scope_spans in resource_spans.scope_spans
            for span in scope_spans.spans
        ]
    )


def decode_logs(body: bytes) -> Records:
    """The lifecycle events of an ``ExportLogsServiceRequest``; other log records are left out.

    Raises:
        google.protobuf.message.DecodeError: ``body`` is not one.
    """
    request = ExportLogsServiceRequest.FromString(body)
    return Records(
        events=[
            Event(
                name=record.event_name.removeprefix(EVENT_PREFIX),
                time_ns=record.time_unix_nano or record.observed_time_unix_nano,
                attributes={**run, **_attributes(record.attributes)},
                sample_ids=_ids(record.body),
                process=process,
                trace_id=record.trace_id.hex(),
                span_id=record.span_id.hex(),
            )
            for resource_logs in request.resource_logs
            for process, run in [(_process(resource_logs.resource), _run(resource_logs.resource))]
            for scope_logs in resource_logs.scope_logs
            for record in scope_logs.log_records
            if record.event_name.startswith(EVENT_PREFIX)
        ]
    )


def _span(span: SpanMessage, process: Process, run: Attributes) -> Span:
    return Span(
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex() or None,
        name=span.name,
        kind=_KINDS.get(span.kind, "unspecified"),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes={**run, **_attributes(span.attributes)},
        process=process,
        links=tuple(Link(link.trace_id.hex(), link.span_id.hex()) for link in span.links),
        outcome=_OUTCOMES.get(span.status.code, "unset"),
        message=span.status.message,
    )


def _process(resource: Resource) -> Process:
    facts = _attributes(resource.attributes)
    pid = facts.get("process.pid", 0)
    return Process(
        service=str(facts.get("service.name", "unknown")),
        instance=str(facts.get("service.instance.id", "")),
        host=str(facts.get("host.name", "")),
        pid=pid if isinstance(pid, int) else 0,
    )


def _run(resource: Resource) -> Attributes:
    """The process's run, of which what is told outside of a step belongs as well."""
    facts = _attributes(resource.attributes)
    return {_RUN_ID: facts[_RUN_ID]} if _RUN_ID in facts else {}


def _attributes(pairs: Iterable[KeyValue]) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Any:
    match value.WhichOneof("value"):
        case "string_value":
            return value.string_value
        case "bool_value":
            return value.bool_value
        case "int_value":
            return value.int_value
        case "double_value":
            return value.double_value
        case "bytes_value":
            return value.bytes_value
        case "array_value":
            return [_value(item) for item in value.array_value.values]
        case "kvlist_value":
            return _attributes(value.kvlist_value.values)
        case _:
            return None


def _ids(body: AnyValue) -> tuple[str, ...]:
    """The ids of a record; none of a body that is no JSON list of them."""
    try:
        found = json.loads(body.string_value or "[]")
    except ValueError:
        return ()
    return tuple(item for item in found if isinstance(item, str)) if isinstance(found, list) else ()
