"""`Origin`: the span, time and weight version of a traced put, stored with its samples."""

from __future__ import annotations

import time
from dataclasses import dataclass

from opentelemetry import trace
from opentelemetry.trace import SpanContext, TraceFlags

from dataplane_core import telemetry

TRACEPARENT_TAG = "traceparent"
"""Tag that carries the origin in stores without support for origins."""

_VERSION = "00"


@dataclass(frozen=True)
class Origin:
    """The origin of samples: one put.

    Attributes:
        span: the span of the put.
        time_ns: start of the put, in nanoseconds since 1970.
        weight_version: version of the weights that generated the data; None if unknown.
    """

    span: SpanContext
    time_ns: int
    weight_version: int | None

    @classmethod
    def current(cls) -> Origin | None:
        """Return the origin of a put that begins now; None outside of a sampled span."""
        span = trace.get_current_span().get_span_context()
        if not span.is_valid or not span.trace_flags.sampled:
            return None
        version = telemetry.step_facts().get(telemetry.WEIGHT_VERSION)
        return cls(span, time.time_ns(), version if isinstance(version, int) else None)

    def __str__(self) -> str:
        """Return the W3C traceparent, the time and the weight version, separated by semicolons."""
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
    def parse(cls, text: str) -> Origin | None:
        """Parse an origin from the text that ``str`` returns for it; None if it is malformed."""
        try:
            traceparent, time_ns, version = text.split(";")
            _, trace_id, span_id, flags = traceparent.split("-")
            span = SpanContext(
                int(trace_id, 16), int(span_id, 16), True, TraceFlags(int(flags, 16))
            )
            origin = cls(span, int(time_ns), int(version) if version else None)
        except ValueError:
            return None
        return origin if span.is_valid else None
