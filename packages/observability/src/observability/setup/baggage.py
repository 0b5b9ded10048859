"""A span processor that copies baggage named ``rl.*`` into the attributes of every span.

Baggage is text on the wire, so integers are parsed again; ``rl.run_id`` stays text even if it
consists of digits.
"""

from __future__ import annotations

from functools import lru_cache

from opentelemetry import baggage
from opentelemetry.context import Context
from opentelemetry.sdk.trace import Span, SpanProcessor


class BaggageProcessor(SpanProcessor):
    """A processor that copies baggage into starting spans; a span's own attributes win."""

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Copy the baggage of the parent context, or of the current one."""
        carried = {
            name: value if isinstance(value, int | float) else _typed(name, str(value))
            for name, value in baggage.get_all(parent_context).items()
            if name.startswith("rl.")
        }
        if carried:
            own = span.attributes or {}
            span.set_attributes({name: carried[name] for name in carried if name not in own})


@lru_cache(maxsize=64)  # all spans of a step have the same few values
def _typed(name: str, text: str) -> str | int:
    digits = text.removeprefix("-")
    if name == "rl.run_id" or not digits.isdecimal() or len(digits) > 18:
        return text
    return int(text) if str(int(text)) == text else text
