"""URLs of the service's own pages.

Ids are quoted in the query, so that no id can change where a link leads.
"""

from __future__ import annotations

from urllib.parse import quote, urlencode, urlsplit


class Link(str):
    """A path within the service; templates put the root path before it."""

    __slots__ = ()


def to(page: str, **query: object) -> Link:
    """Return the path of a page with the values of ``query`` that are neither None nor empty.

    A list gives a parameter for each of its items.
    """
    given = {name: value for name, value in query.items() if value not in (None, "", [])}
    if not given:
        return Link(page)
    # Ids may hold lone surrogates, which UTF-8 cannot encode.
    errors = "backslashreplace"
    return Link(f"{page}?{urlencode(given, doseq=True, quote_via=quote, safe='', errors=errors)}")


def to_sample(sample_id: str, run: str | None, **query: object) -> Link:
    """Return the path of a sample's page in a run.

    An empty ``run`` selects the records without a run; None, the newest run with the sample.
    """
    path = to("/sample", id=sample_id, run=run, **query)
    return Link(f"{path}&run=") if run == "" else path


def external_url(url: str) -> str | None:
    """Return ``url`` if it is http or https, else None; a configured base can be mistyped."""
    try:
        return url if urlsplit(url).scheme in ("http", "https") else None
    except ValueError:
        return None
