"""Typed reads of the attributes in docs/telemetry.md.

Any sender can put any value into an attribute. A value of an unexpected type counts as absent.
"""

from __future__ import annotations

from observability.records import Attributes, Span


def integer(attributes: Attributes, name: str) -> int | None:
    """Return an integer; None if there is none.

    It may be in decimal text, since baggage is text.
    """
    value = attributes.get(name)
    if isinstance(value, bool):  # a bool is an int in Python
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, str) and len(value) < 20 and value.isascii() and value.isdigit():
        return int(value)
    return None


def count(attributes: Attributes, name: str) -> int:
    """Return a number of bytes or samples, never negative; 0 if there is none."""
    return max(0, integer(attributes, name) or 0)


def text(attributes: Attributes, name: str) -> str:
    """Return a string; empty if there is none."""
    value = attributes.get(name)
    return value if isinstance(value, str) else ""


def names(attributes: Attributes, name: str) -> tuple[str, ...]:
    """Return a list of names; empty if there is none."""
    value = attributes.get(name)
    if not isinstance(value, list | tuple):
        return ()
    return tuple(item for item in value if isinstance(item, str))


def run_and_partition(attributes: Attributes) -> tuple[str, str]:
    """Return run id and partition. Another run may use the same partitions and sample ids."""
    return text(attributes, "rl.run_id"), text(attributes, "dataplane.partition")


def bucket(span: Span) -> str | None:
    """Return ``rl.bucket`` of a span; None for a span without it, which only groups others."""
    return text(span.attributes, "rl.bucket") or None
