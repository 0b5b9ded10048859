"""Baggage whose name begins with ``rl.`` becomes attributes of every span.

Baggage is text on the wire, so whole numbers become numbers again, but for ``rl.run_id``, which is
a name even where it is made of digits.
"""

from __future__ import annotations

from functools import lru_cache

from opentelemetry import baggage
from opentelemetry.context import Context
from opentelemetry.sdk.trace import Span, SpanProcessor

Carried = dict[str, str | int | float]


def carried(context: Context | None) -> Carried:
    """The attributes that the baggage of a context stands for, of the current one if None."""
    return {
        name: value if isinstance(value, int | float) else _typed(name, str(value))
        for name, value in baggage.get_all(context).items()
        if name.startswith("rl.")
    }


class BaggageProcessor(SpanProcessor):
    """Copies it into the SDK's spans when they start. What the span was started with stays."""

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Copy."""
        found = carried(parent_context)
        if found:
            own = set(span.attributes or ())  # each look into the attributes takes a lock
            span.set_attributes({name: found[name] for name in found if name not in own})


@lru_cache(maxsize=64)  # the same few for every span of a step
def _typed(name: str, text: str) -> str | int:
    digits = text.removeprefix("-")
    if name == "rl.run_id" or not digits.isdecimal() or len(digits) > 18:
        return text
    return int(text) if str(int(text)) == text else text
