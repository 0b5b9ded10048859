"""Names and ids as text without characters that a terminal, page or log interprets."""

from __future__ import annotations

from collections.abc import Sequence


def printable(value: object) -> str:
    """Return ``str(value)`` with every invisible character replaced by its escape.

    Terminal sequences, line breaks, null bytes and marks that reverse the reading direction become
    ``\\x1b``, ``\\n``, ``\\x00`` and ``\\u202e``. Brackets stay: callers that parse markup must
    escape them.
    """
    shown = str(value)
    # `isprintable` excludes control, format, surrogate, private and unassigned characters, and all
    # separators but the space.
    return shown if shown.isprintable() else "".join(map(_escaped, shown))


def listed(ids: Sequence[str], *, more: bool = False) -> str:
    """Return ids in one printable line; ``more`` adds an ellipsis."""
    return ", ".join([*map(printable, ids), *(["…"] if more else [])])


def _escaped(character: str) -> str:
    if character.isprintable():
        return character
    return character.encode("unicode_escape").decode("ascii")
