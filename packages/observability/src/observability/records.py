"""Spans and lifecycle events as they arrived over OTLP, in plain dataclasses.

Every view of a run, during it or afterwards, reads these records. They are decoded from the bytes
of OTLP export requests and need neither an SDK nor the process that sent them.

In OTLP, zero and empty mean that a field was not set. Here an unset field is never read as a value:
a span with one unset time takes the other one, and a flag marks it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args  # Any: attribute values

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanMessage

from observability.rl_insight import join_steps
from observability.wire import parse

Attributes: TypeAlias = Mapping[str, Any]
Kind = Literal["unspecified", "internal", "server", "client", "producer", "consumer"]
Outcome = Literal["unset", "ok", "error"]

# OTLP numbers both in this order.
_KINDS: dict[int, Kind] = dict(enumerate(get_args(Kind)))
_OUTCOMES: dict[int, Outcome] = dict(enumerate(get_args(Outcome)))


@dataclass(frozen=True, order=True)
class Process:
    """The process that sent a record; equal processes have equal resource attributes.

    Attributes:
        service: ``service.name``, "unknown" if not reported.
        instance: ``service.instance.id``, the rank for example; empty if not reported.
        host: ``host.name``, empty if not reported.
        pid: ``process.pid``, 0 if not reported.
        identity: hexadecimal digest over all attributes of the resource.
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
        """The service and its instance; not necessarily unique."""
        return f"{self.service} {self.instance}".rstrip()

    @property
    def place(self) -> str:
        """The reported location: ``pid@host``, the pod or the host; empty if none was reported."""
        pod = next((str(self.resource[key]) for key in _PODS if self.resource.get(key)), "")
        if not self.pid:
            return pod or self.host
        where = self.host or pod
        return f"{self.pid}@{where}" if where else f"pid {self.pid}"

    @property
    def full_label(self) -> str:
        """The label, followed by the location if it was reported."""
        return f"{self.label} ({self.place})" if self.place else self.label


_PODS = ("k8s.pod.name", "container.id")


def distinct_labels(processes: Iterable[Process]) -> dict[Process, str]:
    """Return the shortest label of each process that distinguishes it from the others."""
    alike: dict[str, list[Process]] = {}
    for process in dict.fromkeys(processes):
        alike.setdefault(process.label, []).append(process)
    return {
        process: label if len(group) == 1 else f"{label} ({_difference(process, group)})"
        for label, group in alike.items()
        for process in group
    }


def _difference(process: Process, alike: Iterable[Process]) -> str:
    """Return what distinguishes a process from others with the same label."""
    others = [other for other in alike if other != process]
    if process.place and all(other.place != process.place for other in others):
        return process.place
    for name, value in sorted(process.resource.items()):
        if value and all(other.resource.get(name) != value for other in others):
            return f"{name}={value}"
    return f"{process.place or 'resource'}, {process.identity[:8]}"


@dataclass(frozen=True)
class Link:
    """A link to another span."""

    trace_id: str
    span_id: str


@dataclass(frozen=True)
class SpanEvent:
    """An event within a span, for example an exception.

    Attributes:
        name: name of the event; `UNNAMED` if it has none.
        time_ns: nanoseconds since 1970 by the clock of its process; 0 if not reported.
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
        parent_id: the parent's ``span_id``; None for a root.
        name: name of the operation; `UNNAMED` if it has none.
        kind: the span kind of OpenTelemetry.
        start_ns: nanoseconds since 1970 by the clock of its process; ``end_ns`` if only that was
            reported, 0 if neither was.
        end_ns: end by the same clock; ``start_ns`` if only that was reported, 0 if neither was.
        attributes: name to value.
        process: the process that recorded it.
        links: the spans it links to.
        outcome: the status; "error" if it failed.
        message: the error message.
        has_start: whether its start was reported.
        has_end: whether its end was reported; an open span has none.
        events: events within the span, in the order reported.
        scope: the instrumentation that recorded it, with its version; empty if not reported.
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
        """True if both the start and the end were reported."""
        return self.has_start and self.has_end

    @property
    def seconds(self) -> float:
        """The duration; 0 if start or end was not reported, or the end precedes the start."""
        return max(0, self.end_ns - self.start_ns) / 1e9

    @property
    def reported_seconds(self) -> float | None:
        """The duration; None unless both start and end were reported."""
        return self.seconds if self.is_timed else None


@dataclass(frozen=True)
class Event:
    """One lifecycle event, for example of a batch of samples or of a run.

    Attributes:
        name: name of the event, for example "put"; see docs/telemetry.md.
        time_ns: nanoseconds since 1970 by the clock of its process; the observed time if only that
            was reported, 0 if neither was.
        attributes: name to value.
        sample_ids: ids of the samples; for a large batch, the ids of one part.
        process: the process that recorded it.
        trace_id: trace of the span it belongs to; empty if there is none.
        span_id: that span; empty if there is none.
        received_ns: time of receipt by the clock of the receiver; 0 if unknown.
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
    """The spans and events received so far.

    Attributes:
        spans: in order of arrival.
        events: in order of arrival.
        refused: number of received spans without a valid trace or span id; not among ``spans``.
    """

    spans: list[Span] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    refused: int = 0

    def add(self, other: Records) -> None:
        """Append the records of another."""
        self.spans += other.spans
        self.events += other.events
        self.refused += other.refused


_RUN_ID = "rl.run_id"

UNNAMED = "(unnamed)"
"""The name of a span or span event that was sent without one."""

EVENT_PREFIX = "dataplane."
"""Prefix of the names of lifecycle events in OTLP; `Event.name` is the rest."""


def decode_traces(body: bytes) -> Records:
    """Decode the spans of an ``ExportTraceServiceRequest``; count those without valid ids.

    Raises:
        google.protobuf.message.DecodeError: ``body`` is not such a request.
    """
    request = ExportTraceServiceRequest()
    parse(request, body)
    join_steps(request.resource_spans)
    records = Records()
    known = _Processes()
    for resource_spans in request.resource_spans:
        process, run = known.process_and_run(resource_spans.resource)
        for scope_spans in resource_spans.scope_spans:
            scope = f"{scope_spans.scope.name} {scope_spans.scope.version}".strip()
            for span in scope_spans.spans:
                if _has_ids(span):
                    records.spans.append(_span(span, process, run, scope))
                else:
                    records.refused += 1
    return records


def decode_logs(body: bytes) -> Records:
    """Decode the lifecycle events of an ``ExportLogsServiceRequest``; skip other log records.

    Raises:
        google.protobuf.message.DecodeError: ``body`` is not such a request.
    """
    request = ExportLogsServiceRequest()
    parse(request, body)
    known = _Processes()
    return Records(
        events=[
            event_of(record, process, run)
            for resource_logs in request.resource_logs
            for process, run in [known.process_and_run(resource_logs.resource)]
            for scope_logs in resource_logs.scope_logs
            for record in scope_logs.log_records
            if record.event_name.startswith(EVENT_PREFIX)
        ]
    )


def event_of(
    record: LogRecord, process: Process, run: Any, *, only: Container[str] | None = None
) -> Event:
    """Return the lifecycle event of a log record; it has no ids if the body is not a list of ids.

    Args:
        record: a log record whose event name begins with `EVENT_PREFIX`.
        process: the process that sent it.
        run: the run id of its resource, from `process_and_run`.
        only: the attributes to decode; None decodes all.
    """
    pairs = record.attributes
    return Event(
        name=record.event_name.removeprefix(EVENT_PREFIX),
        time_ns=record.time_unix_nano or record.observed_time_unix_nano,
        attributes=_with_run(
            pairs if only is None else [pair for pair in pairs if pair.key in only], run
        ),
        sample_ids=sample_ids_of(record.body) or (),
        process=process,
        trace_id=valid_id(record.trace_id, TRACE_ID_BYTES).hex(),
        span_id=valid_id(record.span_id, SPAN_ID_BYTES).hex(),
    )


def sample_ids_of(body: AnyValue) -> tuple[str, ...] | None:
    """Return the ids in the body of an event; None if the body is not a JSON list of strings.

    An empty body has no ids.
    """
    if body.WhichOneof("value") not in (None, "string_value"):
        return None
    if not body.string_value:
        return ()
    try:
        ids = json.loads(body.string_value)
    except (ValueError, RecursionError):
        return None
    if not isinstance(ids, list) or not all(isinstance(item, str) for item in ids):
        return None
    return tuple(ids)


def _has_ids(span: SpanMessage) -> bool:
    has_trace_id = valid_id(span.trace_id, TRACE_ID_BYTES)
    return bool(has_trace_id and valid_id(span.span_id, SPAN_ID_BYTES))


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


def valid_id(raw_id: bytes, length: int) -> bytes:
    """Return an id of a trace or span; empty if its length differs or it is all zero."""
    return raw_id if len(raw_id) == length and any(raw_id) else b""


def process_of(resource: Resource) -> Process:
    """Return the process that a resource describes."""
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
    """Return a 16-byte digest of the attributes that does not depend on their order."""
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


def process_and_run(resource: Resource) -> tuple[Process, Any]:
    """Return the process of a resource, and the run id for its records without one."""
    process = process_of(resource)
    return process, process.resource.get(_RUN_ID)


class _Processes:
    """Decoder of resources that decodes equal ones once: a request may repeat a resource."""

    def __init__(self) -> None:
        self._decoded: dict[bytes, tuple[Process, Any]] = {}

    def process_and_run(self, resource: Resource) -> tuple[Process, Any]:
        """Return `process_and_run` of a resource, decoded once for all equal ones."""
        encoded = resource.SerializeToString()
        decoded = self._decoded.get(encoded)
        if decoded is None:
            decoded = self._decoded[encoded] = process_and_run(resource)
        return decoded


def _with_run(pairs: Iterable[KeyValue], run: Any) -> dict[str, Any]:
    attributes = _attributes(pairs)
    if run is not None and attributes.get(_RUN_ID) in (None, ""):
        attributes[_RUN_ID] = run
    return attributes


def _attributes(pairs: Iterable[KeyValue]) -> dict[str, Any]:
    return {pair.key: value_of(pair.value) for pair in pairs}


def value_of(value: AnyValue) -> Any:
    """Return a value of OTLP as one of Python; None if it is not set."""
    match value.WhichOneof("value"):
        case "array_value":
            return [value_of(item) for item in value.array_value.values]
        case "kvlist_value":
            return _attributes(value.kvlist_value.values)
        case None:
            return None
        case kind:
            return getattr(value, kind)
