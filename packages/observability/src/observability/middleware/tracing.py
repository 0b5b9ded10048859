"""`TracingDataPlaneClient`: a span per operation, linked to the puts that it consumes.

``close`` and ``check_consumption_status`` have no span.

A put stores its `Origin` with its samples. A claim queries the store for the origins of its
samples; a read gets them with the data. The span of a claim or read links to at most `MAX_LINKS`
origins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import Token
from dataclasses import dataclass
from typing import Any  # Any: attribute values

from opentelemetry import context, trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind

from dataplane_core import DataPlaneClient, telemetry
from dataplane_core.telemetry import Bucket
from observability.middleware.observed_client import ObservedClient
from observability.middleware.operation import Observer, Op, Operation
from observability.middleware.origin import TRACEPARENT_TAG, Origin

MAX_LINKS = 128

_SYSTEM = "dataplane"


@dataclass(frozen=True)
class _SpanTemplate:
    """The parts of a span that depend only on the operation.

    Attributes:
        verb: first word of the span's name.
        kind: kind of the span.
        name: name of the operation in attributes.
        type: type of the operation, if its attributes follow OpenTelemetry's messaging conventions;
            None if they follow the database conventions.
        bucket: bucket of the span.
    """

    verb: str
    kind: SpanKind
    name: str
    type: str | None
    bucket: Bucket = "overhead"


_TEMPLATES: Mapping[Op, _SpanTemplate] = {
    "put": _SpanTemplate("send", SpanKind.PRODUCER, "put", "send"),
    "claim_meta": _SpanTemplate("receive", SpanKind.CLIENT, "claim", "receive", "idle"),
    "acknowledge": _SpanTemplate("settle", SpanKind.CLIENT, "acknowledge", "settle"),
    "release": _SpanTemplate("settle", SpanKind.CLIENT, "release", "settle"),
    "renew": _SpanTemplate("settle", SpanKind.CLIENT, "renew", "settle"),
    "clear": _SpanTemplate("settle", SpanKind.CLIENT, "clear", "settle"),
    "get": _SpanTemplate("get", SpanKind.CLIENT, "get", None),
    "get_data": _SpanTemplate("get", SpanKind.CLIENT, "get", None),
    "register": _SpanTemplate("register", SpanKind.CLIENT, "register", None),
}


_READS: tuple[Op, ...] = ("get", "get_data")


class TracingDataPlaneClient(ObservedClient):
    """A client whose batch operations are spans; docs/telemetry.md lists names and attributes.

    Without an SDK in the process it records nothing and costs a few microseconds per operation.

    Args:
        inner: the wrapped client.
    """

    def __init__(self, inner: DataPlaneClient) -> None:
        super().__init__(inner, [Tracing()])


@dataclass(frozen=True)
class _OpenSpan:
    template: _SpanTemplate
    span: Span
    token: Token[Context]


class Tracing(Observer):
    """An observer that records spans."""

    def begin(self, call: Operation) -> _OpenSpan | None:
        template = _TEMPLATES.get(call.op)
        if template is None:
            return None
        span = telemetry.tracer().start_span(
            f"{template.verb} {call.partition_id}",
            kind=template.kind,
            attributes={telemetry.BUCKET: template.bucket},
            start_time=call.started_ns,
        )
        token = context.attach(trace.set_span_in_context(span))
        if not span.is_recording():
            return _OpenSpan(template, span, token)
        try:
            if call.op == "put":
                _attach_origin(call)
            elif call.op in _READS:
                call.request_origins()
        except BaseException:  # even a KeyboardInterrupt must leave no span attached
            context.detach(token)  # `end` gets no state and cannot detach it
            span.end()
            raise
        return _OpenSpan(template, span, token)

    def end(self, call: Operation, state: _OpenSpan | None) -> None:
        if state is None:
            return
        context.detach(state.token)
        span = state.span
        try:
            if span.is_recording():
                if call.error is None and call.op in ("claim_meta", *_READS):
                    _add_links(span, origins_of(call))
                span.set_attributes(_attributes(state.template, call))
                if call.error is not None:
                    telemetry.record_error(span, call.error)
            if call.op == "claim_meta" and call.tags:
                call.tags = _without_traceparent(call.tags)
        finally:
            span.end()


def _without_traceparent(tags: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the tags without the origin, as the caller of the put passed them."""
    if not any(TRACEPARENT_TAG in tag for tag in tags):
        return tags
    return [{key: tag[key] for key in tag if key != TRACEPARENT_TAG} for tag in tags]


def _attach_origin(call: Operation) -> None:
    """Add the origin to a put: as the keyword ``origin`` if the store accepts it, else as a tag."""
    origin = Origin.current()
    if origin is None:
        return
    if call.inner is not None and call.inner.capabilities.origins:
        call.extra.setdefault("origin", str(origin))
    elif call.tags is not None:
        # A put without tags gets none, because the tags of a put replace those of its samples.
        call.tags = [{**tag, TRACEPARENT_TAG: str(origin)} for tag in call.tags]


def origins_of(call: Operation) -> list[tuple[Origin, int]]:
    """Return the origins of the samples that a call claimed or read, each with its frequency."""
    counts: dict[str, int] = dict(call.origins())
    if not counts and call.tags:
        for tag in call.tags:
            text = tag.get(TRACEPARENT_TAG)
            if isinstance(text, str):
                counts[text] = counts.get(text, 0) + 1
    parsed = ((Origin.parse(text), count) for text, count in counts.items())
    return [(origin, count) for origin, count in parsed if origin is not None]


def _add_links(span: Span, origins: Sequence[tuple[Origin, int]]) -> None:
    for origin, _ in origins[:MAX_LINKS]:
        span.add_link(origin.span)
    if len(origins) > MAX_LINKS:
        span.set_attribute("dataplane.links_dropped", len(origins) - MAX_LINKS)


def _attributes(template: _SpanTemplate, call: Operation) -> dict[str, Any]:
    if template.type is None:
        attributes: dict[str, Any] = {
            "db.system.name": _SYSTEM,
            "db.operation.name": template.name,
            "db.collection.name": call.partition_id,
            "db.operation.batch.size": call.n_keys,
        }
    else:
        attributes = {
            "messaging.system": _SYSTEM,
            "messaging.operation.name": template.name,
            "messaging.operation.type": template.type,
            "messaging.destination.name": call.partition_id,
            "messaging.batch.message_count": call.n_keys,
        }
        if call.tasks:
            attributes["messaging.consumer.group.name"] = call.tasks[0]
    if call.fields:
        attributes["dataplane.fields"] = sorted(set(call.fields))
    if call.op in ("put", *_READS):
        attributes["dataplane.bytes"] = call.n_bytes
    return attributes
