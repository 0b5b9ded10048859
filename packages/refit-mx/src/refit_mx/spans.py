"""Spans of a refit. They cost next to nothing in a process that set up no OpenTelemetry SDK."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.trace import Span, StatusCode

OnPhase = Callable[[str], None]
"""Called with the name of each phase as it begins; what it raises ends the operation."""


@contextmanager
def phase(name: str, version_id: str, on_phase: OnPhase | None = None) -> Iterator[Span]:
    """A span ``refit.<name>`` of one phase.

    An error is told by its class alone: messages may name hosts and paths.
    """
    tracer = trace.get_tracer("refit-mx")
    with tracer.start_as_current_span(
        f"refit.{name}",
        attributes={"refit.version": version_id},
        record_exception=False,
        set_status_on_exception=False,
    ) as span:
        try:
            if on_phase is not None:
                on_phase(name)
            yield span
        except BaseException as error:
            span.set_attribute("error.type", type(error).__name__)
            span.set_status(StatusCode.ERROR)
            raise


def tell_bytes(span: Span, nbytes: int, seconds: float) -> None:
    """Put the amount and the speed on a span."""
    span.set_attribute("refit.bytes", nbytes)
    if seconds > 0:
        span.set_attribute("refit.gb_per_s", nbytes / seconds / 1e9)
