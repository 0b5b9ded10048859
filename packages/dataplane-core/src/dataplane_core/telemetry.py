"""Spans of a step, and the context that travels with it between processes.

Only OpenTelemetry's API is used, so all of it costs next to nothing until a process sets up an SDK.
What a step is (`rl.step`) travels as baggage beside the trace context.
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
"""What a process does during a span; docs/telemetry.md says which is which."""

BUCKET = "rl.bucket"
RUN_ID = "rl.run_id"
STEP = "rl.step"
WEIGHT_VERSION = "rl.weight_version"
ERROR_TYPE = "error.type"

_VERBOSE = "rl.verbose"
_SCOPE = "rl-dataplane"
# Fixed, whatever OTEL_PROPAGATORS says: both ends of a carrier are ours.
_trace_context, _baggage = TraceContextTextMapPropagator(), W3CBaggagePropagator()
_BAGGAGE = "baggage"


def inject() -> dict[str, str]:
    """The current context as a carrier: a small dict that travels as an argument."""
    carrier: dict[str, str] = {}
    _trace_context.inject(carrier)
    pairs = tuple((name, str(value)) for name, value in baggage.get_all().items())
    if pairs and (header := _header(pairs)):
        carrier[_BAGGAGE] = header
    return carrier


def extract(carrier: Mapping[str, str] | None) -> Context:
    """The context that `inject` put into ``carrier``; of None or an empty one the current."""
    if not carrier:
        return context.get_current()
    return _trace_context.extract(carrier, _carried(carrier.get(_BAGGAGE, "")))


# The baggage of a step is that of its run, step and weight version: the same for every call.


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
    run_id: str, step: int, weight_version: int, *, verbose: bool = False
) -> Iterator[None]:
    """Let everything below know its run and step.

    Args:
        run_id: of the run.
        step: completed steps before this one.
        weight_version: of the weights that this step generates and trains with.
        verbose: `detail_span` makes spans too.
    """
    current = context.get_current()
    for name, value in ((RUN_ID, run_id), (STEP, step), (WEIGHT_VERSION, weight_version)):
        current = baggage.set_baggage(name, str(value), current)
    if verbose:
        current = baggage.set_baggage(_VERBOSE, "1", current)
    token = context.attach(current)
    try:
        yield
    finally:
        context.detach(token)


def step_facts(of: Context | None = None) -> dict[str, str | int]:
    """Run, step and weight version of a context, the current one if None, as attributes."""
    facts: dict[str, str | int] = {}
    carried = baggage.get_all(of)
    for name in (RUN_ID, STEP, WEIGHT_VERSION):
        value = carried.get(name)
        if isinstance(value, str):
            facts[name] = int(value) if name != RUN_ID and value.isdecimal() else value
    return facts


@contextmanager
def span(
    name: str,
    bucket: Bucket | None = None,
    *,
    kind: SpanKind = SpanKind.INTERNAL,
    attributes: Mapping[str, AttributeValue] | None = None,
) -> Iterator[Span]:
    """A span around a block, the current one inside it.

    An error that leaves the block is recorded by its class, and what it cost counts as wasted.
    """
    own = dict(attributes or {})
    if bucket is not None:
        own[BUCKET] = bucket
    # By hand what `start_as_current_span` does, in half the time.
    made = tracer().start_span(name, kind=kind, attributes=own)
    token = context.attach(trace.set_span_in_context(made))
    try:
        yield made
    except BaseException as error:
        record_error(made, error)
        raise
    finally:
        context.detach(token)
        made.end()


@contextmanager
def detail_span(
    name: str,
    bucket: Bucket | None = None,
    *,
    attributes: Mapping[str, AttributeValue] | None = None,
) -> Iterator[None]:
    """A `span` that only a verbose `step_context` makes."""
    if baggage.get_baggage(_VERBOSE) is None:
        yield
        return
    with span(name, bucket, attributes=attributes):
        yield


def record_error(failed: Span, error: BaseException) -> None:
    """Mark a span as failed; its text is left out, which may hold what samples say."""
    failed.set_attribute(ERROR_TYPE, type(error).__qualname__)
    failed.set_attribute(BUCKET, "wasted")
    failed.set_status(Status(StatusCode.ERROR, type(error).__qualname__))


def tracer() -> trace.Tracer:
    """Ours, of the provider that is set now."""
    global _tracer
    provider = trace.get_tracer_provider()
    if provider is not _tracer[0]:
        _tracer = provider, provider.get_tracer(_SCOPE)
    return _tracer[1]


# Kept with its provider: making one takes as long as the rest of a span.
_tracer: tuple[trace.TracerProvider | None, trace.Tracer] = None, trace.NoOpTracer()
