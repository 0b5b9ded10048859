"""Parents for spans that are compared with the SDK's own."""

from opentelemetry import baggage, context, trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, TraceState

PARENT = SpanContext(
    7, 8, is_remote=True, trace_flags=TraceFlags(3), trace_state=TraceState([("a", "b")])
)


def below(parent: SpanContext = PARENT) -> context.Context:
    """A context of which this span and some baggage are a part."""
    current = trace.set_span_in_context(NonRecordingSpan(parent), context.Context())
    for name, value in (("rl.step", "3"), ("rl.run_id", "12"), ("other", "x")):
        current = baggage.set_baggage(name, value, current)
    return current
