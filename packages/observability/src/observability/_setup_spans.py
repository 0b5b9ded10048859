"""Spans that are kept as plain values; `_setup_span_export` encodes them.

Between the work of a step nothing is in the processor's caches, and what a span costs is the code
that it passes through. The SDK's passes through much: locks, limits, cleaned attributes, baggage.
Of that only the baggage is read here, in the thread that exports. What only a few spans need, a
root's sampling or an exception for example, is left to the SDK.
"""

from __future__ import annotations

import logging
import random
import traceback
from collections.abc import Mapping, Sequence
from functools import lru_cache
from time import time_ns
from types import TracebackType
from typing import Any, cast  # Any: values of attributes

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.attributes import BoundedAttributes
from opentelemetry.context import Context
from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope as ScopeMessage
from opentelemetry.proto.resource.v1.resource_pb2 import Resource as ResourceMessage
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanMessage
from opentelemetry.proto.trace.v1.trace_pb2 import SpanFlags
from opentelemetry.proto.trace.v1.trace_pb2 import Status as StatusMessage
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import (
    Event,
    ReadableSpan,
    SpanLimits,
    SpanProcessor,
    Tracer,
    TracerProvider,
)
from opentelemetry.sdk.trace.sampling import ParentBased
from opentelemetry.sdk.util import BoundedList
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    Link,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
)
from opentelemetry.util.types import Attributes, AttributeValue

from observability._setup_baggage import carried
from observability._setup_encoding import (
    Unusual,
    attribute_bytes,
    resource_message,
    scope_message,
)

logger = logging.getLogger("opentelemetry.sdk.trace")  # as the SDK, which `Troubles` listens to

_PLAIN = frozenset({str, int, float, bool})
_LISTS = frozenset({list, tuple})
_UNSET = Status(StatusCode.UNSET)
_KINDS = {
    SpanKind.INTERNAL: SpanMessage.SPAN_KIND_INTERNAL,
    SpanKind.SERVER: SpanMessage.SPAN_KIND_SERVER,
    SpanKind.CLIENT: SpanMessage.SPAN_KIND_CLIENT,
    SpanKind.PRODUCER: SpanMessage.SPAN_KIND_PRODUCER,
    SpanKind.CONSUMER: SpanMessage.SPAN_KIND_CONSUMER,
}
_CODES = {
    StatusCode.UNSET: StatusMessage.STATUS_CODE_UNSET,
    StatusCode.OK: StatusMessage.STATUS_CODE_OK,
    StatusCode.ERROR: StatusMessage.STATUS_CODE_ERROR,
}
_KNOWN_FLAGS = TraceFlags.SAMPLED | TraceFlags.RANDOM_TRACE_ID


class LeanSpan(trace.Span):
    """A sampled span. As the SDK's, but for when its attributes are checked: at the export.

    Args:
        tracer: which started it.
        context: its own.
        parent: its parent's.
        started_in: with the baggage that it carries.
    """

    def __init__(
        self,
        tracer: LeanTracer,
        context: SpanContext,
        *,
        parent: SpanContext,
        started_in: Context,
        name: str,
        kind: SpanKind,
        attributes: Attributes,
        start_ns: int,
    ) -> None:
        self.context = context
        self._tracer = tracer
        self._parent = parent
        self._started_in = started_in
        self._name = name
        self._kind = kind
        self._attributes = _kept(attributes) if attributes else {}
        self._links: list[Link] = []
        self._events: list[Event] = []
        self._status = _UNSET
        self._records = True, True
        self._open = [None]
        self._end_ns: int | None = None
        self._start_ns = start_ns

    def get_span_context(self) -> SpanContext:
        """See `opentelemetry.trace.Span`, as for all below."""
        return self.context

    def is_recording(self) -> bool:
        return self._end_ns is None

    def end(self, end_time: int | None = None) -> None:
        try:
            self._open.pop()  # one of several threads at once gets it
        except IndexError:
            logger.warning("Calling end() on an ended span.")
            return
        self._end_ns = time_ns() if end_time is None else end_time
        # What is queued needs of it only `context`; it is made readable when it is exported.
        self._tracer.processor.on_end(cast("ReadableSpan", self))

    def set_attributes(self, attributes: Mapping[str, AttributeValue]) -> None:
        if self._ended("Setting attribute"):
            return
        self._attributes.update(_kept(attributes))

    def set_attribute(self, key: str, value: AttributeValue) -> None:
        if self._ended("Setting attribute"):
            return
        if type(value) in _PLAIN:
            self._attributes[key] = value
        else:
            self._attributes.update(_kept({key: value}))

    def add_event(
        self, name: str, attributes: Attributes = None, timestamp: int | None = None
    ) -> None:
        if self._ended("Adding an event"):
            return
        limits = self._tracer.limits
        kept = BoundedAttributes(
            limits.max_event_attributes, attributes, max_value_len=limits.max_attribute_length
        )
        self._events.append(Event(name, kept, timestamp))

    def add_link(self, context: SpanContext, attributes: Attributes = None) -> None:
        if self._ended("Adding a link") or not (
            context and (context.is_valid or attributes or context.trace_state)
        ):
            return
        self._links.append(Link(context, _kept(attributes) if attributes else None))

    def update_name(self, name: str) -> None:
        if not self._ended("Renaming"):
            self._name = name

    def set_status(self, status: Status | StatusCode, description: str | None = None) -> None:
        if self._ended("Setting status"):
            return
        given = status if isinstance(status, Status) else Status(status, description)
        decided = self._status.status_code is StatusCode.OK
        if not decided and given.status_code is not StatusCode.UNSET:
            self._status = given

    def record_exception(
        self,
        exception: BaseException,
        attributes: Attributes = None,
        timestamp: int | None = None,
        escaped: bool = False,
    ) -> None:
        kind = type(exception)
        module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
        found: dict[str, Any] = {
            "exception.type": f"{module}{kind.__qualname__}",
            "exception.message": str(exception),
            "exception.stacktrace": "".join(traceback.format_exception(exception)),
            "exception.escaped": str(escaped),
        }
        self.add_event("exception", {**found, **(attributes or {})}, timestamp)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        if error is not None and self.is_recording():
            exceptions, status = self._records
            if exceptions:
                self.record_exception(error, escaped=True)
            if status:
                self.set_status(Status(StatusCode.ERROR, f"{type(error).__name__}: {error}"))
        super().__exit__(kind, error, where)

    def readable(self) -> ReadableSpan:
        """The SDK's form of it."""
        tracer, limits = self._tracer, self._tracer.limits
        attributes = {**carried(self._started_in), **self._attributes}
        links = [
            Link(
                link.context,
                BoundedAttributes(
                    limits.max_link_attributes,
                    link.attributes,
                    max_value_len=limits.max_attribute_length,
                ),
            )
            for link in self._links
        ]
        return ReadableSpan(
            self._name,
            self.context,
            self._parent,
            tracer.resource,
            BoundedAttributes(
                limits.max_span_attributes,
                attributes,
                max_value_len=limits.max_span_attribute_length,
            ),
            BoundedList.from_seq(limits.max_events, self._events),
            BoundedList.from_seq(limits.max_links, links),
            self._kind,
            status=self._status,
            start_time=self._start_ns,
            end_time=self._end_ns,
            instrumentation_scope=tracer.scope,
        )

    def message(self) -> SpanMessage:
        """OTLP's form of it.

        Raises:
            Unusual: it has what only the SDK encodes; see `readable`.
            ValueError: as `attribute_bytes`.
        """
        limits = self._tracer.limits
        attributes = {**carried(self._started_in), **self._attributes}
        if (
            self._events
            or limits.max_span_attribute_length is not None
            or _beyond(len(attributes), limits.max_span_attributes)
            or _beyond(len(self._links), limits.max_links)
        ):
            raise Unusual("it has events, or too much of something")
        own, parent, status = self.context, self._parent, self._status
        message = SpanMessage(
            trace_id=own.trace_id.to_bytes(16, "big"),
            span_id=own.span_id.to_bytes(8, "big"),
            parent_span_id=parent.span_id.to_bytes(8, "big"),
            name=self._name,
            kind=_KINDS[self._kind],
            start_time_unix_nano=self._start_ns,
            end_time_unix_nano=self._end_ns or 0,
            flags=_remote_flags(parent),
        )
        if own.trace_state:
            message.trace_state = _listed(own.trace_state)
        if status is not _UNSET:
            message.status.CopyFrom(
                StatusMessage(code=_CODES[status.status_code], message=status.description or "")
            )
        for link in self._links:
            if link.attributes:
                raise Unusual("a link has attributes")
            message.links.add(
                trace_id=link.context.trace_id.to_bytes(16, "big"),
                span_id=link.context.span_id.to_bytes(8, "big"),
                flags=_remote_flags(link.context),
            )
        message.MergeFromString(attribute_bytes(SpanMessage, attributes))
        return message

    @property
    def tracer(self) -> LeanTracer:
        """What started it."""
        return self._tracer

    def _ended(self, what: str) -> bool:
        if self._end_ns is None:
            return False
        logger.warning("%s on an ended span.", what)
        return True


def _kept(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy that the caller cannot change afterwards."""
    found: dict[str, Any] = {}
    for key, value in attributes.items():
        kind = type(value)
        if kind in _PLAIN:
            found[key] = value
        elif kind in _LISTS and all(type(item) in _PLAIN for item in value):
            found[key] = tuple(value)
        else:
            found.update(BoundedAttributes(attributes={key: value}))
    return found


class LeanTracer(trace.Tracer):
    """Starts lean spans below sampled ones.

    Args:
        sdk: starts all others.
        processor: gets the lean ones when they end.
        resource: of the process, as the SDK and as OTLP have it.
        limits: of spans.
        scope: of the tracer, likewise.
    """

    def __init__(
        self,
        sdk: trace.Tracer,
        processor: SpanProcessor,
        *,
        resource: tuple[Resource, ResourceMessage],
        limits: SpanLimits,
        scope: tuple[InstrumentationScope, ScopeMessage],
    ) -> None:
        self.processor = processor
        self.resource, self.resource_message = resource
        self.limits = limits
        self.scope, self.scope_message = scope
        self._sdk = sdk

    def start_span(
        self,
        name: str,
        context: Context | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        start_time: int | None = None,
        record_exception: bool = True,
        set_status_on_exception: bool = True,
    ) -> trace.Span:
        """See `opentelemetry.trace.Tracer.start_span`."""
        current = otel_context.get_current() if context is None else context
        parent = trace.get_current_span(current).get_span_context()
        flags = parent.trace_flags
        if not flags & TraceFlags.SAMPLED or not parent.is_valid:
            return self._sdk.start_span(
                name,
                context,
                kind,
                attributes,
                links,
                start_time,
                record_exception,
                set_status_on_exception,
            )
        own = SpanContext(
            parent.trace_id,
            random.getrandbits(64) or 1,
            False,
            flags if flags <= _KNOWN_FLAGS else TraceFlags(flags & _KNOWN_FLAGS),
            parent.trace_state,
        )
        span = LeanSpan(
            self,
            own,
            parent=parent,
            started_in=current,
            name=name,
            kind=kind,
            attributes=attributes,
            start_ns=time_ns() if start_time is None else start_time,
        )
        if links:
            for link in links:
                span.add_link(link.context, link.attributes)
        if not (record_exception and set_status_on_exception):
            span._records = record_exception, set_status_on_exception
        return span

    # Of the SDK's it asks for nothing but `start_span`.
    start_as_current_span = Tracer.start_as_current_span


class LeanTracerProvider(trace.TracerProvider):
    """Lean spans wherever a sampled parent decides that its children are sampled, else the SDK's.

    Args:
        sdk: makes the others.
        processor: one of the SDK provider's; gets the lean spans when they end.
    """

    def __init__(self, sdk: TracerProvider, processor: SpanProcessor) -> None:
        self._sdk = sdk
        self._processor = processor
        self._limits = SpanLimits()
        self._parents_decide = isinstance(sdk.sampler, ParentBased)
        self._resource = resource_message(sdk.resource)
        # A library may ask for its tracer in each call.
        self._kept = lru_cache(maxsize=256)(self._make)

    def get_tracer(
        self,
        instrumenting_module_name: str,
        instrumenting_library_version: str | None = None,
        schema_url: str | None = None,
        attributes: Attributes = None,
    ) -> trace.Tracer:
        """See `opentelemetry.trace.TracerProvider.get_tracer`."""
        named = instrumenting_module_name, instrumenting_library_version, schema_url
        return self._kept(*named) if attributes is None else self._make(*named, attributes)

    def _make(
        self,
        name: str,
        version: str | None,
        schema_url: str | None,
        attributes: Attributes = None,
    ) -> trace.Tracer:
        sdk = self._sdk.get_tracer(name, version, schema_url, attributes)
        scope = InstrumentationScope(name, version, schema_url, attributes)
        message = scope_message(scope)
        if not self._parents_decide or self._resource is None or message is None:
            return sdk
        return LeanTracer(
            sdk,
            self._processor,
            resource=(self._sdk.resource, self._resource),
            limits=self._limits,
            scope=(scope, message),
        )


def _beyond(found: int, limit: int | None) -> bool:
    return limit is not None and found > limit


def _remote_flags(context: SpanContext) -> int:
    known = SpanFlags.SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK
    return known | SpanFlags.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK if context.is_remote else known


def _listed(state: TraceState) -> str:
    return ",".join(f"{key}={value}" for key, value in state.items())
