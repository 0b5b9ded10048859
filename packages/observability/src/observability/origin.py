"""What a traced put leaves with its samples: who wrote them, when, and with which weights."""

from __future__ import annotations

import time
from dataclasses import dataclass

from opentelemetry import trace
from opentelemetry.trace import SpanContext, TraceFlags

from dataplane_core import telemetry

TRACEPARENT_TAG = "traceparent"
"""Tag that carries the text where the store keeps no origins."""

_VERSION = "00"


@dataclass(frozen=True)
class Origin:
    """One put.

    Attributes:
        span: its span.
        time_ns: when it began, nanoseconds since 1970.
        weight_version: of the weights that generated what it wrote, None if that is not known.
    """

    span: SpanContext
    time_ns: int
    weight_version: int | None

    @classmethod
    def current(cls) -> Origin | None:
        """Of a put that begins now in the current span; None outside of a sampled one."""
        span = trace.get_current_span().get_span_context()
        if not span.is_valid or not span.trace_flags.sampled:
            return None
        version = telemetry.step_facts().get(telemetry.WEIGHT_VERSION)
        return cls(span, time.time_ns(), version if isinstance(version, int) else None)

    def __str__(self) -> str:
        """A W3C traceparent, the time and the weight version, with semicolons between them."""
        traceparent = "-".join(
            (
                _VERSION,
                trace.format_trace_id(self.span.trace_id),
                trace.format_span_id(self.span.span_id),
                f"{self.span.trace_flags:02x}",
            )
        )
        version = "" if self.weight_version is None else str(self.weight_version)
        return f"{traceparent};{self.time_ns};{version}"

    @classmethod
    def parsed(cls, text: str) -> Origin | None:
        """What `str` made; None of anything else, which another producer may have left."""
        try:
            traceparent, time_ns, version = text.split(";")
            _, trace_id, span_id, flags = traceparent.split("-")
            span = SpanContext(
                int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=_flags(flags)
            )
            origin = cls(span, int(time_ns), int(version) if version else None)
        except ValueError:
            return None
        return origin if span.is_valid else None


def _flags(text: str) -> TraceFlags:
    return TraceFlags(int(text, 16))
