"""Names and ids as text that no terminal, page or log acts upon."""

from __future__ import annotations

from collections.abc import Sequence


def printable(value: object) -> str:
    """``str(value)`` with every character that is not a visible one written as its escape.

    Terminal sequences, line breaks, null bytes and marks that turn the reading direction come out
    as ``\\x1b``, ``\\n``, ``\\x00`` and ``\\u202e``. Square brackets and angle brackets stay: where
    they would mean something, the caller does not parse markup, or escapes it.
    """
    shown = str(value)
    # Python's notion: neither control, format, surrogate, private or unassigned characters, nor
    # separators but the space.
    return shown if shown.isprintable() else "".join(map(_escaped, shown))


def listed(ids: Sequence[str], *, more: bool = False) -> str:
    """Ids in one line, printable; ``more`` says that there are others."""
    return ", ".join([*map(printable, ids), *(["…"] if more else [])])


def _escaped(character: str) -> str:
    if character.isprintable():
        return character
    return character.encode("unicode_escape").decode("ascii")
