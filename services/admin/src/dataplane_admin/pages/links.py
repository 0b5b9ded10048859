"""Addresses of the service's own pages.

Whatever an id holds goes into the query, quoted, so that no id can lead anywhere else.
"""

from __future__ import annotations

from urllib.parse import quote, urlencode, urlsplit


class Link(str):
    """A path within the service; where a template writes it out, the root path is put before it."""

    __slots__ = ()


def to(page: str, **query: object) -> Link:
    """Return the path of a page, with those of ``query`` that are not None and not empty."""
    told = {name: value for name, value in query.items() if value is not None and value != ""}
    if not told:
        return Link(page)
    # Ids may hold half a surrogate pair, which UTF-8 has no form for.
    return Link(f"{page}?{urlencode(told, quote_via=quote, safe='', errors='backslashreplace')}")


def outward(url: str) -> str | None:
    """``url`` if a browser may be sent there, else None; a configured base can be mistyped."""
    try:
        return url if urlsplit(url).scheme in ("http", "https") else None
    except ValueError:
        return None
