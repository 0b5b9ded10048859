"""`TracingDataPlaneClient`: a span per operation, linked to the puts it consumes.

A put leaves its `Origin` with its samples. A claim or a read asks the store which puts its samples
come from and links to them, at most `MOST_LINKS`. What a span tells of its operation is put on it
`later`; it ends with the operation all the same.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextvars import Token
from dataclasses import dataclass
from functools import partial
from typing import Any  # Any: attribute values

from opentelemetry import context, trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind

from dataplane_core import DataPlaneClient, telemetry
from dataplane_core.telemetry import Bucket
from observability.lane import later
from observability.operations import ObservedClient, Observer, Op, Operation
from observability.origin import TRACEPARENT_TAG, Origin

MOST_LINKS = 128

_SYSTEM = "dataplane"


@dataclass(frozen=True)
class _Form:
    """How an operation is told: the verb of its span's name, its kind, its name and its type.

    ``type`` is that of OpenTelemetry's messaging conventions; None for operations that follow
    those of databases.
    """

    verb: str
    kind: SpanKind
    name: str
    type: str | None
    bucket: Bucket = "overhead"


_FORMS: Mapping[Op, _Form] = {
    "put": _Form("send", SpanKind.PRODUCER, "put", "send"),
    "claim_meta": _Form("receive", SpanKind.CLIENT, "claim", "receive", "idle"),
    "acknowledge": _Form("settle", SpanKind.CLIENT, "acknowledge", "settle"),
    "release": _Form("settle", SpanKind.CLIENT, "release", "settle"),
    "renew": _Form("settle", SpanKind.CLIENT, "renew", "settle"),
    "clear": _Form("settle", SpanKind.CLIENT, "clear", "settle"),
    "get": _Form("get", SpanKind.CLIENT, "get", None),
    "get_data": _Form("get", SpanKind.CLIENT, "get", None),
    "register": _Form("register", SpanKind.CLIENT, "register", None),
}


_READS: tuple[Op, ...] = ("get", "get_data")


class TracingDataPlaneClient(ObservedClient):
    """A client whose batch operations are spans; docs/telemetry.md lists names and attributes.

    Without an SDK in the process it costs a few microseconds per operation and does nothing.

    Args:
        inner: the client that does the work.
    """

    def __init__(self, inner: DataPlaneClient) -> None:
        super().__init__(inner, [Tracing()])


@dataclass(frozen=True)
class _Begun:
    form: _Form
    span: Span
    token: Token[Context]


class Tracing(Observer):
    """Makes the spans."""

    def begin(self, call: Operation) -> _Begun | None:
        """See `Observer.begin`."""
        form = _FORMS.get(call.op)
        if form is None:
            return None
        span = telemetry.tracer().start_span(
            f"{form.verb} {call.partition_id}",
            kind=form.kind,
            attributes={telemetry.BUCKET: form.bucket},
        )
        token = context.attach(trace.set_span_in_context(span))
        if not span.is_recording():
            return _Begun(form, span, token)
        try:
            if call.op == "put":
                _leave_origin(call)
            elif call.op in _READS:
                call.ask_origins()
        except BaseException:
            context.detach(token)  # nobody else will: `end` gets no state
            span.end()
            raise
        return _Begun(form, span, token)

    def end(self, call: Operation, state: _Begun | None) -> None:
        """See `Observer.end`."""
        if state is None:
            return
        ended_ns = time.time_ns()
        context.detach(state.token)
        span = state.span
        try:
            origins: Mapping[str, int] = {}
            if span.is_recording() and call.error is None and call.op in ("claim_meta", *_READS):
                origins = _origin_texts(call)
            if call.op == "claim_meta" and call.tags:
                call.tags = _without_traceparent(call.tags)
        finally:
            finish = partial(_finish, span, state.form, call, tuple(call.fields), origins, ended_ns)
            if call.error is None:
                later(trace.get_tracer_provider(), finish)
            else:
                finish()  # the error holds on to what was to be put


def _finish(
    span: Span,
    form: _Form,
    call: Operation,
    fields: Sequence[str],
    origins: Mapping[str, int],
    ended_ns: int,
) -> None:
    try:
        if span.is_recording():
            _link(span, _parsed(origins))
            span.set_attributes(_attributes(form, call, fields))
            if call.error is not None:
                telemetry.record_error(span, call.error)
    finally:
        span.end(ended_ns)


def _without_traceparent(tags: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the user put."""
    if not any(TRACEPARENT_TAG in tag for tag in tags):
        return tags
    return [{key: tag[key] for key in tag if key != TRACEPARENT_TAG} for tag in tags]


def _leave_origin(call: Operation) -> None:
    origin = Origin.current()
    if origin is None or call.inner is None:
        return
    if call.inner.capabilities.origins:
        call.extra.setdefault("origin", str(origin))
    elif call.tags is not None:
        # Giving tags replaces what a sample has, so where there are none, none are given.
        call.tags = [{**tag, TRACEPARENT_TAG: str(origin)} for tag in call.tags]


def origins_of(call: Operation) -> list[tuple[Origin, int]]:
    """The puts that a claim or a read consumes, and of how many samples; the most first."""
    return _parsed(_origin_texts(call))


def _origin_texts(call: Operation) -> Mapping[str, int]:
    found: dict[str, int] = dict(call.origins())
    if not found and call.tags:
        for tag in call.tags:
            text = tag.get(TRACEPARENT_TAG)
            if isinstance(text, str):
                found[text] = found.get(text, 0) + 1
    return found


def _parsed(origins: Mapping[str, int]) -> list[tuple[Origin, int]]:
    parsed = ((Origin.parsed(text), count) for text, count in origins.items())
    return [(origin, count) for origin, count in parsed if origin is not None]


def _link(span: Span, origins: Sequence[tuple[Origin, int]]) -> None:
    for origin, _ in origins[:MOST_LINKS]:
        span.add_link(origin.span)
    if len(origins) > MOST_LINKS:
        span.set_attribute("dataplane.links_dropped", len(origins) - MOST_LINKS)


def _attributes(form: _Form, call: Operation, fields: Sequence[str]) -> dict[str, Any]:
    if form.type is None:
        found: dict[str, Any] = {
            "db.system.name": _SYSTEM,
            "db.operation.name": form.name,
            "db.collection.name": call.partition_id,
            "db.operation.batch.size": call.n_keys,
        }
    else:
        found = {
            "messaging.system": _SYSTEM,
            "messaging.operation.name": form.name,
            "messaging.operation.type": form.type,
            "messaging.destination.name": call.partition_id,
            "messaging.batch.message_count": call.n_keys,
        }
        if call.tasks:
            found["messaging.consumer.group.name"] = call.tasks[0]
    if fields:
        found["dataplane.fields"] = _sorted(fields)
    if call.op in ("put", *_READS):
        found["dataplane.bytes"] = call.n_bytes
    return found


def _sorted(names: Iterable[str]) -> list[str]:
    return sorted(set(names))
