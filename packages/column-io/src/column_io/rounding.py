"""Rounding of sequence lengths to the alignment that a backend asks for."""

from __future__ import annotations


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``value``.

    Args:
        value: a length, in tokens.
        multiple: the alignment, in tokens; 1 or less returns ``value``.
    """
    if multiple <= 1:
        return value
    return -(-value // multiple) * multiple
