"""Spans and lifecycle events received over OTLP, in plain dataclasses.

Every view reads these records, during a run and afterwards. They are decoded from the bytes of OTLP
export requests and need neither an SDK nor the process that sent them.

In OTLP, zero and empty mean that a field is not set. Decoding never takes them for values. For
example, a span whose end is not set gets its start as end, and `Span.has_end` is False.

Decoding also copies ``rl.run_id`` from the resource to records without one. It adds run and step to
RL-Insight's spans and changes their trace ids; see `observability.rl_insight.join_steps`.
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
SpanKind = Literal["unspecified", "internal", "server", "client", "producer", "consumer"]
Outcome = Literal["unset", "ok", "error"]

# OTLP numbers kinds and status codes from 0 in the order of the literals above.
_KINDS: dict[int, SpanKind] = dict(enumerate(get_args(SpanKind)))
_OUTCOMES: dict[int, Outcome] = dict(enumerate(get_args(Outcome)))


@dataclass(frozen=True, order=True)
class Process:
    """The process that sent a record. Processes are equal if their resource attributes are.

    Attributes:
        service: ``service.name``; "unknown" if not reported.
        instance: ``service.instance.id``, for example the rank; empty if not reported.
        host: ``host.name``, empty if not reported.
        pid: ``process.pid``, 0 if not reported.
        identity: hexadecimal digest of all resource attributes.
        resource: all resource attributes by name.
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
    def location(self) -> str:
        """The reported location, ``pid@host`` if both are known; empty if none was reported.

        If the host is unknown, the pod name or container id stands in for it. If the pid is
        unknown, the pod name or container id is returned instead of the host.
        """
        pod_values = (self.resource.get(name) for name in _POD_ATTRIBUTES)
        pod = next((str(value) for value in pod_values if value), "")
        if not self.pid:
            return pod or self.host
        host_or_pod = self.host or pod
        return f"{self.pid}@{host_or_pod}" if host_or_pod else f"pid {self.pid}"

    @property
    def full_label(self) -> str:
        """The label, followed by the location if it was reported."""
        return f"{self.label} ({self.location})" if self.location else self.label


_POD_ATTRIBUTES = ("k8s.pod.name", "container.id")


def distinct_labels(processes: Iterable[Process]) -> dict[Process, str]:
    """Return a distinct label for each process.

    If processes have the same `Process.label`, a property in which they differ is appended.
    """
    by_label: dict[str, list[Process]] = {}
    for process in dict.fromkeys(processes):
        by_label.setdefault(process.label, []).append(process)
    return {
        process: label if len(group) == 1 else f"{label} ({_difference(process, group)})"
        for label, group in by_label.items()
        for process in group
    }


def _difference(process: Process, group: Iterable[Process]) -> str:
    """Return a property that distinguishes a process from the others in a group.

    This is the location or a resource attribute. If neither differs from all others, the digest of
    all attributes does.
    """
    others = [other for other in group if other != process]
    if process.location and all(other.location != process.location for other in others):
        return process.location
    for name, value in sorted(process.resource.items()):
        if value and all(other.resource.get(name) != value for other in others):
            return f"{name}={value}"
    return f"{process.location or 'resource'}, {process.identity[:8]}"


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
        outcome: the status code; "error" if it failed.
        message: the status message, which describes the error.
        has_start: whether its start was reported.
        has_end: whether its end was reported; False for an open span.
        events: events within the span, in the order reported.
        scope: name and version of its instrumentation scope; empty if not reported.
    """

    trace_id: str
    span_id: str
    parent_id: str | None
    name: str
    kind: SpanKind
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
        """The duration in seconds; 0 if the start or end is unknown or the end comes first."""
        return max(0, self.end_ns - self.start_ns) / 1e9

    @property
    def reported_seconds(self) -> float | None:
        """The duration in seconds; None unless both start and end were reported."""
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
        trace_id: trace of the span during which it was emitted; empty if there was none.
        span_id: id of that span; empty if there was none.
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
        rejected_spans: number of spans that are not in ``spans`` because their trace or span id
            was invalid.
    """

    spans: list[Span] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    rejected_spans: int = 0

    def add(self, other: Records) -> None:
        """Append the records of ``other``."""
        self.spans += other.spans
        self.events += other.events
        self.rejected_spans += other.rejected_spans


_RUN_ID = "rl.run_id"

UNNAMED = "(unnamed)"
"""The name of a span or span event that was sent without one."""

EVENT_PREFIX = "dataplane."
"""Prefix of the names of lifecycle events in OTLP; `Event.name` is the rest."""


def decode_traces(body: bytes) -> Records:
    """Decode the spans of an ``ExportTraceServiceRequest``; skip and count those with invalid ids.

    Raises:
        google.protobuf.message.DecodeError: ``body`` is not such a request.
    """
    request = ExportTraceServiceRequest()
    parse(request, body)
    join_steps(request.resource_spans)
    records = Records()
    resources = _ResourceDecoder()
    for resource_spans in request.resource_spans:
        process, run = resources.process_and_run(resource_spans.resource)
        for scope_spans in resource_spans.scope_spans:
            scope = f"{scope_spans.scope.name} {scope_spans.scope.version}".strip()
            for span in scope_spans.spans:
                if _has_valid_ids(span):
                    records.spans.append(_span(span, process, run, scope))
                else:
                    records.rejected_spans += 1
    return records


def decode_logs(body: bytes) -> Records:
    """Decode the lifecycle events of an ``ExportLogsServiceRequest``; skip other log records.

    Raises:
        google.protobuf.message.DecodeError: ``body`` is not such a request.
    """
    request = ExportLogsServiceRequest()
    parse(request, body)
    resources = _ResourceDecoder()
    return Records(
        events=[
            event_of(record, process, run)
            for resource_logs in request.resource_logs
            for process, run in [resources.process_and_run(resource_logs.resource)]
            for scope_logs in resource_logs.scope_logs
            for record in scope_logs.log_records
            if record.event_name.startswith(EVENT_PREFIX)
        ]
    )


def event_of(
    record: LogRecord, process: Process, run: Any, *, only: Container[str] | None = None
) -> Event:
    """Convert a log record to a lifecycle event.

    The event has no sample ids if the body is not a JSON list of strings.

    Args:
        record: a log record whose event name begins with `EVENT_PREFIX`.
        process: the process that sent it.
        run: the run id of its resource, from `process_and_run`.
        only: names of the attributes to decode; None decodes all.
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
    """Return the sample ids in the body of an event.

    Returns:
        An empty tuple for an empty body; None if the body is not a JSON list of strings.
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


def _has_valid_ids(span: SpanMessage) -> bool:
    trace_id = valid_id(span.trace_id, TRACE_ID_BYTES)
    return bool(trace_id and valid_id(span.span_id, SPAN_ID_BYTES))


def _span(span: SpanMessage, process: Process, run: Any, scope: str) -> Span:
    # A trace may have many thousands of spans, most without links and events.
    start_ns, end_ns = span.start_time_unix_nano, span.end_time_unix_nano
    parent_id, status, links, events = span.parent_span_id, span.status, span.links, span.events
    return Span(
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=parent_id.hex() if any(parent_id) else None,
        name=span.name or UNNAMED,
        kind=_KINDS.get(span.kind, "unspecified"),
        start_ns=start_ns or end_ns,
        end_ns=end_ns or start_ns,
        attributes=_with_run(span.attributes, run),
        process=process,
        links=tuple(
            Link(link.trace_id.hex(), link.span_id.hex())
            for link in links
            if valid_id(link.trace_id, TRACE_ID_BYTES)
        )
        if links
        else (),
        outcome=_OUTCOMES.get(status.code, "unset"),
        message=status.message,
        has_start=start_ns > 0,
        has_end=end_ns > 0,
        events=tuple(
            SpanEvent(event.name or UNNAMED, event.time_unix_nano, _attributes(event.attributes))
            for event in events
        )
        if events
        else (),
        scope=scope,
    )


TRACE_ID_BYTES = 16
SPAN_ID_BYTES = 8


def valid_id(raw_id: bytes, length: int) -> bytes:
    """Return a trace or span id unchanged; empty if it has another length or is all zero."""
    return raw_id if len(raw_id) == length and any(raw_id) else b""


def process_of(resource: Resource) -> Process:
    """Return the process that a resource describes."""
    attributes = _attributes(resource.attributes)
    return Process(
        service=_text(attributes, "service.name") or "unknown",
        instance=_text(attributes, "service.instance.id"),
        host=_text(attributes, "host.name"),
        pid=_pid(attributes.get("process.pid")),
        identity=identity_of(resource.attributes).hex(),
        resource=attributes,
    )


def identity_of(pairs: Iterable[KeyValue]) -> bytes:
    """Return a 16-byte digest of attributes that does not depend on their order."""
    digest = hashlib.blake2b(digest_size=16)
    # The last value of a repeated key counts, as in `_attributes`.
    for _, pair in sorted({pair.key: pair for pair in pairs}.items()):
        encoded = pair.SerializeToString(deterministic=True)
        # Each attribute begins with its length, so different attributes give different bytes.
        digest.update(len(encoded).to_bytes(4, "little") + encoded)
    return digest.digest()


def _text(attributes: Attributes, name: str) -> str:
    value = attributes.get(name)
    return "" if value is None else str(value)


def _pid(value: object) -> int:
    """Return the value as a process id.

    A positive integer or decimal text is accepted; anything else gives 0.
    """
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 20:
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def process_and_run(resource: Resource) -> tuple[Process, Any]:
    """Return the process that a resource describes, and its run id or None.

    The run id applies to records of the resource that have no run id.
    """
    process = process_of(resource)
    return process, process.resource.get(_RUN_ID)


class _ResourceDecoder:
    """Decoder of the resources of one request, which may repeat a resource many times."""

    def __init__(self) -> None:
        self._decoded: dict[bytes, tuple[Process, Any]] = {}

    def process_and_run(self, resource: Resource) -> tuple[Process, Any]:
        """Return what the function `process_and_run` returns; decode equal resources once."""
        encoded = resource.SerializeToString()
        decoded = self._decoded.get(encoded)
        if decoded is None:
            decoded = self._decoded[encoded] = process_and_run(resource)
        return decoded


def _with_run(pairs: Iterable[KeyValue], run: Any) -> dict[str, Any]:
    """Return decoded attributes, with ``run`` as run id if they have none."""
    attributes = _attributes(pairs)
    if run is not None and attributes.get(_RUN_ID) in (None, ""):
        attributes[_RUN_ID] = run
    return attributes


def _attributes(pairs: Iterable[KeyValue]) -> dict[str, Any]:
    return {pair.key: value_of(pair.value) for pair in pairs}


def value_of(value: AnyValue) -> Any:
    """Convert an OTLP value to a Python value; None if it is not set."""
    match value.WhichOneof("value"):
        case "array_value":
            return [value_of(item) for item in value.array_value.values]
        case "kvlist_value":
            return _attributes(value.kvlist_value.values)
        case None:
            return None
        case kind:
            return getattr(value, kind)
