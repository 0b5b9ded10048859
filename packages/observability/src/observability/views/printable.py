"""Names and ids as text without characters that a terminal, page or log interprets."""

from __future__ import annotations

from collections.abc import Sequence


def printable(value: object) -> str:
    """Return ``str(value)`` with every invisible character replaced by its escape.

    For example, a line break becomes ``\\n``, and the escape character that begins a terminal
    sequence becomes ``\\x1b``. Markup is not escaped.
    """
    text = str(value)
    # `isprintable` is False for control, format, surrogate, private and unassigned characters, and
    # for all separators but the space.
    return text if text.isprintable() else "".join(map(_escape, text))


def join_printable(texts: Sequence[str], *, ellipsis: bool = False) -> str:
    """Return texts in one printable line, separated by commas, optionally with an ellipsis."""
    return ", ".join([*map(printable, texts), *(["…"] if ellipsis else [])])


def _escape(character: str) -> str:
    if character.isprintable():
        return character
    return character.encode("unicode_escape").decode("ascii")
