"""Spans of a refit. They cost next to nothing in a process that set up no OpenTelemetry SDK.

The phases that move or check weights are always told. The others are short and many: they are told
where the baggage `VERBOSE` asks for it, and where they fail.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from opentelemetry import baggage, context, trace
from opentelemetry.trace import INVALID_SPAN, Span, StatusCode

OnPhase = Callable[[str], None]
"""Called with the name of each phase as it begins; what it raises ends the operation."""

VERBOSE = "rl.verbose"
"""Baggage that asks for every phase, whatever its value."""

_DETAILS = frozenset({"stage", "serve", "offer", "lease", "discover"})


@contextmanager
def phase(name: str, version_id: str, on_phase: OnPhase | None = None) -> Iterator[Span]:
    """A span ``refit.<name>`` of one phase.

    An error is told by its class alone: messages may name hosts and paths.
    """
    if name in _DETAILS and baggage.get_baggage(VERBOSE) is None:
        began = time.time_ns()
        try:
            if on_phase is not None:
                on_phase(name)
            yield INVALID_SPAN
        except BaseException as error:
            failed = _start(name, version_id, began)
            _tell_error(failed, error)
            failed.end()
            raise
        return
    # By hand what `start_as_current_span` does, in half the time.
    span = _start(name, version_id)
    token = context.attach(trace.set_span_in_context(span))
    try:
        if on_phase is not None:
            on_phase(name)
        yield span
    except BaseException as error:
        _tell_error(span, error)
        raise
    finally:
        context.detach(token)
        span.end()


def tell_bytes(span: Span, nbytes: int, seconds: float) -> None:
    """Put the amount and the speed on a span."""
    span.set_attribute("refit.bytes", nbytes)
    if seconds > 0:
        span.set_attribute("refit.gb_per_s", nbytes / seconds / 1e9)


def _start(name: str, version_id: str, began_ns: int | None = None) -> Span:
    return tracer().start_span(
        f"refit.{name}", attributes={"refit.version": version_id}, start_time=began_ns
    )


def _tell_error(span: Span, error: BaseException) -> None:
    span.set_attribute("error.type", type(error).__name__)
    span.set_status(StatusCode.ERROR)


def tracer() -> trace.Tracer:
    """Ours, of the provider that is set now."""
    global _made
    provider = trace.get_tracer_provider()
    if provider is not _made[0]:
        _made = provider, provider.get_tracer("refit-mx")
    return _made[1]


# Kept with its provider: making one takes as long as the rest of a span.
_made: tuple[trace.TracerProvider | None, trace.Tracer] = None, trace.NoOpTracer()
