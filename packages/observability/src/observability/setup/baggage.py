"""A span processor that copies baggage named ``rl.*`` into the attributes of every span."""

from __future__ import annotations

from opentelemetry import baggage
from opentelemetry.context import Context
from opentelemetry.sdk.trace import Span, SpanProcessor

from dataplane_core.telemetry import baggage_value


class BaggageProcessor(SpanProcessor):
    """A processor that copies baggage into starting spans.

    An attribute that the span already has is not replaced.
    """

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Copy the baggage of the parent context, or of the current one."""
        carried = {
            name: value if isinstance(value, int | float) else baggage_value(name, str(value))
            for name, value in baggage.get_all(parent_context).items()
            if name.startswith("rl.")
        }
        if carried:
            own = span.attributes or {}
            span.set_attributes({name: carried[name] for name in carried if name not in own})
