"""A span processor that copies baggage named ``rl.*`` into the attributes of every span.

Baggage is text on the wire, so values that are integers are parsed. ``rl.run_id`` remains text even
if it consists of digits.
"""

from __future__ import annotations

from functools import lru_cache

from opentelemetry import baggage
from opentelemetry.context import Context
from opentelemetry.sdk.trace import Span, SpanProcessor


class BaggageProcessor(SpanProcessor):
    """A processor that copies baggage into starting spans.

    An attribute that the span already has is not replaced.
    """

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Copy the baggage of the parent context, or of the current one."""
        carried = {
            name: value if isinstance(value, int | float) else _parse(name, str(value))
            for name, value in baggage.get_all(parent_context).items()
            if name.startswith("rl.")
        }
        if carried:
            own = span.attributes or {}
            span.set_attributes({name: carried[name] for name in carried if name not in own})


@lru_cache(maxsize=64)  # all spans of a step have the same few values
def _parse(name: str, text: str) -> str | int:
    digits = text.removeprefix("-")
    if name == "rl.run_id" or not digits.isdecimal() or len(digits) > 18:
        return text
    return int(text) if str(int(text)) == text else text  # "007" remains text
