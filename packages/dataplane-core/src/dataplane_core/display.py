"""Short descriptions of batches for people: one line, and an HTML table for notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

MAX_ROWS = 8
"""Maximum number of rows of an HTML table."""
_MAX_TEXT = 40


def shorten(value: object) -> str:
    """Return the text of a value, cut to 40 characters."""
    text = str(value)
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}…"


def quote_first(names: Sequence[str], total: int) -> str:
    """Return ``names`` in quotes, and an ellipsis if they are only the first of ``total`` names."""
    more = ["…"] if total > len(names) else []
    return ", ".join([*(repr(shorten(name)) for name in names), *more])


def html_table(caption: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return an HTML table with the first `MAX_ROWS` rows; all texts are escaped."""

    def line(cells: Sequence[object], tag: str) -> str:
        return "".join(f"<{tag}>{escape(shorten(cell))}</{tag}>" for cell in cells)

    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows[:MAX_ROWS])
    if len(rows) > MAX_ROWS:
        body += f'<tr><td colspan="{len(header)}">… {len(rows) - MAX_ROWS:,} more</td></tr>'
    return (
        f"<table><caption>{escape(caption)}</caption><thead><tr>{line(header, 'th')}</tr></thead>"
        f"<tbody>{body}</tbody></table>"
    )
