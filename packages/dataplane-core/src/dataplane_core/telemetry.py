"""Spans of a step, and their context, which is passed between processes.

This module uses OpenTelemetry's API alone, so it costs almost nothing unless a process sets up an
SDK. Run, step and weight version are passed as baggage, together with the trace context.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Literal

from opentelemetry import baggage, context, trace
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

Bucket = Literal["productive", "overhead", "idle", "wasted"]
"""Kind of time that a process spends in a span; docs/tracing.md defines the buckets."""

BUCKET = "rl.bucket"
RUN_ID = "rl.run_id"
STEP = "rl.step"
WEIGHT_VERSION = "rl.weight_version"
ERROR_TYPE = "error.type"

_VERBOSE = "rl.verbose"
_SCOPE = "rl-dataplane"
# Fixed, so OTEL_PROPAGATORS is ignored: both ends of a carrier are data-plane processes.
_trace_context, _baggage = TraceContextTextMapPropagator(), W3CBaggagePropagator()
_BAGGAGE = "baggage"


def inject() -> dict[str, str]:
    """Return the current context as a carrier: a small dict to pass to another process."""
    carrier: dict[str, str] = {}
    _trace_context.inject(carrier)
    pairs = tuple((name, str(value)) for name, value in baggage.get_all().items())
    if pairs and (header := _header(pairs)):
        carrier[_BAGGAGE] = header
    return carrier


def extract(carrier: Mapping[str, str] | None) -> Context:
    """Return the context that `inject` put into ``carrier``; the current one without a carrier."""
    if not carrier:
        return context.get_current()
    return _trace_context.extract(carrier, _carried(carrier.get(_BAGGAGE, "")))


# The caches are small: all calls of a step have the same baggage.


@lru_cache(maxsize=16)
def _header(pairs: tuple[tuple[str, str], ...]) -> str:
    carried, carrier = Context(), dict[str, str]()
    for name, value in pairs:
        carried = baggage.set_baggage(name, value, carried)
    _baggage.inject(carrier, carried)
    return carrier.get(_BAGGAGE, "")


@lru_cache(maxsize=16)
def _carried(header: str) -> Context:
    return _baggage.extract({_BAGGAGE: header}, Context()) if header else Context()


@contextmanager
def attached(carrier: Mapping[str, str] | None) -> Iterator[None]:
    """Make the context of ``carrier`` the current one."""
    token = context.attach(extract(carrier))
    try:
        yield
    finally:
        context.detach(token)


@contextmanager
def step_context(
    run_id: str, step: int | None, weight_version: int | None, *, verbose: bool = False
) -> Iterator[None]:
    """Set run, step and weight version in the context of a block.

    Args:
        run_id: id of the run.
        step: number of completed steps before this one; None for work outside any step, such
            as a rollout of asynchronous training.
        weight_version: version of the weights with which the step generates and trains; None for
            work without weights, such as a put of prompts.
        verbose: let `detail_span` record spans.
    """
    current = context.get_current()
    for name, value in ((RUN_ID, run_id), (STEP, step), (WEIGHT_VERSION, weight_version)):
        current = (
            baggage.remove_baggage(name, current)
            if value is None
            else baggage.set_baggage(name, str(value), current)
        )
    if verbose:
        current = baggage.set_baggage(_VERBOSE, "1", current)
    token = context.attach(current)
    try:
        yield
    finally:
        context.detach(token)


def step_facts(source: Context | None = None) -> dict[str, str | int]:
    """Return run, step and weight version of ``source``, or of the current context, as a dict."""
    facts: dict[str, str | int] = {}
    carried = baggage.get_all(source)
    for name in (RUN_ID, STEP, WEIGHT_VERSION):
        value = carried.get(name)
        if isinstance(value, str):
            facts[name] = baggage_value(name, value)
    return facts


@lru_cache(maxsize=64)  # all calls of a step have the same few values
def baggage_value(name: str, text: str) -> str | int:
    """Return a value of the baggage, which is text on the wire, as an attribute of telemetry.

    Integers of at most 18 digits are parsed, since attributes have 64 bits; "007" remains text. A
    run id remains text even if it consists of digits.
    """
    digits = text.removeprefix("-")
    if name == RUN_ID or not digits.isdecimal() or len(digits) > 18:
        return text
    return int(text) if str(int(text)) == text else text


@contextmanager
def span(
    name: str,
    bucket: Bucket | None = None,
    *,
    kind: SpanKind = SpanKind.INTERNAL,
    attributes: Mapping[str, AttributeValue] | None = None,
) -> Iterator[Span]:
    """Record a span of a block, and make it the current span in the block.

    An error that leaves the block is recorded by its class, and sets the span's bucket to wasted.
    """
    own = dict(attributes or {})
    if bucket is not None:
        own[BUCKET] = bucket
    # The same as `start_as_current_span`, in half the time.
    started = tracer().start_span(name, kind=kind, attributes=own)
    token = context.attach(trace.set_span_in_context(started))
    try:
        yield started
    except BaseException as error:  # interrupts and cancelled tasks too
        record_error(started, error)
        raise
    finally:
        context.detach(token)
        started.end()


@contextmanager
def detail_span(
    name: str,
    bucket: Bucket | None = None,
    *,
    attributes: Mapping[str, AttributeValue] | None = None,
) -> Iterator[None]:
    """Record a `span` if the `step_context` is verbose."""
    if baggage.get_baggage(_VERBOSE) is None:
        yield
        return
    with span(name, bucket, attributes=attributes):
        yield


def record_error(failed: Span, error: BaseException) -> None:
    """Mark a span as failed, without the error's message, which may contain sample values."""
    failed.set_attribute(ERROR_TYPE, type(error).__qualname__)
    failed.set_attribute(BUCKET, "wasted")
    failed.set_status(Status(StatusCode.ERROR, type(error).__qualname__))


def tracer() -> trace.Tracer:
    """Return the data plane's tracer of the current provider."""
    global _tracer
    provider = trace.get_tracer_provider()
    if provider is not _tracer[0]:
        _tracer = provider, provider.get_tracer(_SCOPE)
    return _tracer[1]


# Cached with its provider: creating a tracer takes as long as the rest of a span.
_tracer: tuple[trace.TracerProvider | None, trace.Tracer] = None, trace.NoOpTracer()
