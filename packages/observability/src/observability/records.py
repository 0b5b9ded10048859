"""Spans and lifecycle events as they arrived over OTLP, in plain dataclasses.

Everything that looks at a run, while it goes on or afterwards, works on these: they are decoded
from the bytes of OTLP export requests and need neither an SDK nor the process that made them.

In OTLP zero and empty mean that a field was not set. What was not set is never taken for a value
here: an unset time takes the nearest one that is known, and says so.
"""

from __future__ import annotations

import hashlib
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

from observability.wire import parse

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
    """Where a record comes from. Processes are equal if their whole resources are.

    Attributes:
        service: ``service.name``, "unknown" if not reported.
        instance: ``service.instance.id``, the rank for example; empty if not reported.
        host: ``host.name``, empty if not reported.
        pid: ``process.pid``, 0 if not reported.
        identity: hexadecimal digest of every attribute of the resource.
        resource: attributes of the resource.
    """

    service: str
    instance: str = ""
    host: str = ""
    pid: int = 0
    identity: str = ""
    resource: Attributes = field(default_factory=dict, compare=False, repr=False)

    @property
    def label(self) -> str:
        """The service and its instance; other processes may have the same."""
        return f"{self.service} {self.instance}".rstrip()

    @property
    def place(self) -> str:
        """Where it runs, as far as that was reported: ``pid@host``, the pod or the host."""
        pod = next((str(self.resource[key]) for key in _PODS if self.resource.get(key)), "")
        if not self.pid:
            return pod or self.host
        where = self.host or pod
        return f"{self.pid}@{where}" if where else f"pid {self.pid}"

    @property
    def full_label(self) -> str:
        """The label and, where it was reported, the place."""
        return f"{self.label} ({self.place})" if self.place else self.label


_PODS = ("k8s.pod.name", "container.id")


def distinct_labels(processes: Iterable[Process]) -> dict[Process, str]:
    """A label of each process that no other one of them has, as short as that allows."""
    alike: dict[str, list[Process]] = {}
    for process in dict.fromkeys(processes):
        alike.setdefault(process.label, []).append(process)
    return {
        process: label if len(those) == 1 else f"{label} ({_difference(process, those)})"
        for label, those in alike.items()
        for process in those
    }


def _difference(process: Process, alike: Iterable[Process]) -> str:
    """What tells a process from others of the same label."""
    others = [one for one in alike if one != process]
    if process.place and all(one.place != process.place for one in others):
        return process.place
    for name, value in sorted(process.resource.items()):
        if value and all(one.resource.get(name) != value for one in others):
            return f"{name}={value}"
    return f"{process.place or 'resource'}, {process.identity[:8]}"


@dataclass(frozen=True)
class Link:
    """A span that another one is about."""

    trace_id: str
    span_id: str


@dataclass(frozen=True)
class SpanEvent:
    """Something that happened within a span: an exception, for example.

    Attributes:
        name: what happened.
        time_ns: nanoseconds since 1970, by the clock of its process; 0 if not reported.
        attributes: name to value.
    """

    name: str
    time_ns: int
    attributes: Attributes


@dataclass(frozen=True)
class Span:
    """One span.

    Attributes:
        trace_id: 32 hexadecimal digits.
        span_id: 16 hexadecimal digits.
        parent_id: the parent's ``span_id``, None of a root.
        name: what was done; `UNNAMED` if it has no name.
        kind: OpenTelemetry's.
        start_ns: nanoseconds since 1970, by the clock of its process; ``end_ns`` if only that was
            reported, 0 if neither was.
        end_ns: as ``start_ns``; ``start_ns`` if only that was reported.
        attributes: name to value.
        process: which made it.
        links: the spans it is about.
        outcome: "error" if it failed.
        message: why it failed.
        has_start: whether its start was reported.
        has_end: whether its end was reported; a span that is still open has none.
        events: what happened within it, in the order reported.
        scope: the instrumentation that made it, with its version; empty if not reported.
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
    has_start: bool = True
    has_end: bool = True
    events: tuple[SpanEvent, ...] = ()
    scope: str = ""

    @property
    def is_timed(self) -> bool:
        """Whether its start and its end were reported."""
        return self.has_start and self.has_end

    @property
    def seconds(self) -> float:
        """The duration; 0 if start or end was not reported, or the end lies before the start."""
        return max(0, self.end_ns - self.start_ns) / 1e9

    @property
    def reported_seconds(self) -> float | None:
        """The duration; None if start or end was not reported."""
        return self.seconds if self.is_timed else None


@dataclass(frozen=True)
class Event:
    """One lifecycle event: what one batch operation did to samples.

    Attributes:
        name: what happened, "put" for example; see docs/telemetry.md.
        time_ns: nanoseconds since 1970, by the clock of its process; when it was observed if only
            that was reported, 0 if neither was.
        attributes: name to value.
        sample_ids: the samples; of a large batch one part.
        process: which made it.
        trace_id: of the span it belongs to; empty if there is none.
        span_id: as ``trace_id``.
        received_ns: when it was received, by the clock of the receiver; 0 if unknown.
    """

    name: str
    time_ns: int
    attributes: Attributes
    sample_ids: tuple[str, ...]
    process: Process
    trace_id: str = ""
    span_id: str = ""
    received_ns: int = field(default=0, compare=False)


@dataclass
class Records:
    """What a run reported so far.

    Attributes:
        spans: in the order in which they came.
        events: as ``spans``.
        refused: spans that came without a valid trace or span id, and are not among ``spans``.
    """

    spans: list[Span] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    refused: int = 0

    def add(self, other: Records) -> None:
        """Append what another holds."""
        self.spans += other.spans
        self.events += other.events
        self.refused += other.refused


_RUN_ID = "rl.run_id"

UNNAMED = "(unnamed)"
"""The name of a span that was sent without one."""

EVENT_PREFIX = "dataplane."
"""What the names of lifecycle events begin with in OTLP; `Event.name` is the rest."""


def decode_traces(body: bytes) -> Records:
    """The spans of an ``ExportTraceServiceRequest``; those without valid ids are only counted.

    Raises:
        google.protobuf.message.DecodeError: ``body`` is not one.
    """
    request = ExportTraceServiceRequest()
    parse(request, body)
    records = Records()
    for resource_spans in request.resource_spans:
        process, run = _process_and_run(resource_spans.resource)
        for scope_spans in resource_spans.scope_spans:
            scope = f"{scope_spans.scope.name} {scope_spans.scope.version}".strip()
            for span in scope_spans.spans:
                if _has_ids(span):
                    records.spans.append(_span(span, process, run, scope))
                else:
                    records.refused += 1
    return records


def decode_logs(body: bytes) -> Records:
    """The lifecycle events of an ``ExportLogsServiceRequest``; other log records are left out.

    Raises:
        google.protobuf.message.DecodeError: ``body`` is not one.
    """
    request = ExportLogsServiceRequest()
    parse(request, body)
    return Records(
        events=[
            Event(
                name=record.event_name.removeprefix(EVENT_PREFIX),
                time_ns=record.time_unix_nano or record.observed_time_unix_nano,
                attributes=_with_run(record.attributes, run),
                sample_ids=_ids(record.body),
                process=process,
                trace_id=valid_id(record.trace_id, TRACE_ID_BYTES).hex(),
                span_id=valid_id(record.span_id, SPAN_ID_BYTES).hex(),
            )
            for resource_logs in request.resource_logs
            for process, run in [_process_and_run(resource_logs.resource)]
            for scope_logs in resource_logs.scope_logs
            for record in scope_logs.log_records
            if record.event_name.startswith(EVENT_PREFIX)
        ]
    )


def _has_ids(span: SpanMessage) -> bool:
    is_of_trace = valid_id(span.trace_id, TRACE_ID_BYTES)
    return bool(is_of_trace and valid_id(span.span_id, SPAN_ID_BYTES))


def _span(span: SpanMessage, process: Process, run: Any, scope: str) -> Span:
    start_ns, end_ns = span.start_time_unix_nano, span.end_time_unix_nano
    return Span(
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex() if any(span.parent_span_id) else None,
        name=span.name or UNNAMED,
        kind=_KINDS.get(span.kind, "unspecified"),
        start_ns=start_ns or end_ns,
        end_ns=end_ns or start_ns,
        attributes=_with_run(span.attributes, run),
        process=process,
        links=tuple(
            Link(link.trace_id.hex(), link.span_id.hex())
            for link in span.links
            if valid_id(link.trace_id, TRACE_ID_BYTES)
        ),
        outcome=_OUTCOMES.get(span.status.code, "unset"),
        message=span.status.message,
        has_start=start_ns > 0,
        has_end=end_ns > 0,
        events=tuple(
            SpanEvent(event.name or UNNAMED, event.time_unix_nano, _attributes(event.attributes))
            for event in span.events
        ),
        scope=scope,
    )


TRACE_ID_BYTES = 16
SPAN_ID_BYTES = 8


def valid_id(found: bytes, length: int) -> bytes:
    """An id of a trace or span, empty if it is none: of another length, or all zero."""
    return found if len(found) == length and any(found) else b""


def process_of(resource: Resource) -> Process:
    """The process that a resource describes."""
    facts = _attributes(resource.attributes)
    return Process(
        service=_fact(facts, "service.name") or "unknown",
        instance=_fact(facts, "service.instance.id"),
        host=_fact(facts, "host.name"),
        pid=_pid(facts.get("process.pid")),
        identity=identity_of(resource.attributes).hex(),
        resource=facts,
    )


def identity_of(pairs: Iterable[KeyValue]) -> bytes:
    """A digest of 16 bytes that is equal for equal attributes, in whatever order they come."""
    digest = hashlib.blake2b(digest_size=16)
    for _, pair in sorted({pair.key: pair for pair in pairs}.items()):
        encoded = pair.SerializeToString(deterministic=True)
        digest.update(len(encoded).to_bytes(4, "little") + encoded)
    return digest.digest()


def _fact(facts: Attributes, name: str) -> str:
    value = facts.get(name)
    return "" if value is None else str(value)


def _pid(value: object) -> int:
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 20:
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _process_and_run(resource: Resource) -> tuple[Process, Any]:
    """A process, and the run that what it reports outside of a step belongs to as well."""
    process = process_of(resource)
    return process, process.resource.get(_RUN_ID)


def _with_run(pairs: Iterable[KeyValue], run: Any) -> dict[str, Any]:
    found = _attributes(pairs)
    if run is not None and found.get(_RUN_ID) in (None, ""):
        found[_RUN_ID] = run
    return found


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
