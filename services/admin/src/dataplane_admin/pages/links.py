"""Addresses of the service's own pages.

Whatever an id holds goes into the query, quoted, so that no id can lead anywhere else.
"""

from __future__ import annotations

from urllib.parse import quote, urlencode, urlsplit


def to(page: str, **query: object) -> str:
    """The path of a page, with those of ``query`` that are not None and not empty."""
    told = {name: value for name, value in query.items() if value is not None and value != ""}
    if not told:
        return page
    # Ids may hold half a surrogate pair, which UTF-8 has no form for.
    return f"{page}?{urlencode(told, quote_via=quote, safe='', errors='backslashreplace')}"


def outward(url: str) -> str | None:
    """``url`` if a browser may be sent there, else None; a configured base can be mistyped."""
    try:
        return url if urlsplit(url).scheme in ("http", "https") else None
    except ValueError:
        return None


def back(path: str | None) -> str:
    """A path of ours to return to, or ``/`` if ``path`` is not one."""
    if path and path.startswith("/") and not path.startswith(("//", "/\\")) and path.isprintable():
        return path
    return "/"
