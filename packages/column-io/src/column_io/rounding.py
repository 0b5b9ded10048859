"""Rounding of sequence lengths to the alignment that a backend requires."""

from __future__ import annotations

from dataplane_core.arguments import MIN_INT, checked_int


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``value``.

    Args:
        value: a length of at least 0, in tokens.
        multiple: the alignment, in tokens; 1 or less returns ``value``.

    Raises:
        InvalidRequestError: (a ValueError) an argument is not an int, or ``value`` is below 0.
    """
    value = checked_int("round_up", "value", value)
    multiple = checked_int("round_up", "multiple", multiple, minimum=MIN_INT)
    if multiple <= 1:
        return value
    return -(-value // multiple) * multiple
