"""`TracingDataPlaneClient`: a span per operation, linked to the puts it consumes.

A put leaves its `Origin` with its samples. A claim or a read asks the store which puts its samples
come from and links to them, at most `MOST_LINKS`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any  # Any: attribute values

from opentelemetry.trace import Span, SpanKind

from dataplane_core import DataPlaneClient, telemetry
from dataplane_core.telemetry import Bucket
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
    block: AbstractContextManager[Span]


class Tracing(Observer):
    """Makes the spans."""

    def begin(self, call: Operation) -> _Begun | None:
        """See `Observer.begin`."""
        form = _FORMS.get(call.op)
        if form is None:
            return None
        block = telemetry.span(f"{form.verb} {call.partition_id}", form.bucket, kind=form.kind)
        begun = _Begun(form, block.__enter__(), block)
        if call.op == "put" and begun.span.is_recording():
            try:
                _leave_origin(call)
            except BaseException:
                block.__exit__(None, None, None)  # nobody else will: `end` gets no state
                raise
        elif call.op in _READS and begun.span.is_recording():
            call.ask_origins()
        return begun

    def end(self, call: Operation, state: _Begun | None) -> None:
        """See `Observer.end`."""
        if state is None:
            return
        try:
            if state.span.is_recording():
                if call.error is None and call.op in ("claim_meta", *_READS):
                    _link(state.span, call)
                state.span.set_attributes(_attributes(state.form, call))
                if call.error is not None:
                    telemetry.record_error(state.span, call.error)
            if call.op == "claim_meta" and call.tags:
                call.tags = _without_traceparent(call.tags)
        finally:
            state.block.__exit__(None, None, None)


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
    found: dict[str, int] = dict(call.origins())
    if not found and call.tags:
        for tag in call.tags:
            text = tag.get(TRACEPARENT_TAG)
            if isinstance(text, str):
                found[text] = found.get(text, 0) + 1
    parsed = ((Origin.parsed(text), count) for text, count in found.items())
    return [(origin, count) for origin, count in parsed if origin is not None]


def _link(span: Span, call: Operation) -> None:
    origins = origins_of(call)
    for origin, _ in origins[:MOST_LINKS]:
        span.add_link(origin.span)
    if len(origins) > MOST_LINKS:
        span.set_attribute("dataplane.links_dropped", len(origins) - MOST_LINKS)


def _attributes(form: _Form, call: Operation) -> dict[str, Any]:
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
    if call.fields:
        found["dataplane.fields"] = _sorted(call.fields)
    if call.op in ("put", *_READS):
        found["dataplane.bytes"] = call.n_bytes
    return found


def _sorted(names: Iterable[str]) -> list[str]:
    return sorted(set(names))
