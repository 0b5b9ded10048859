"""Text of others in a database: any sample id as bytes, names as what every database takes."""

from __future__ import annotations

HEAD_BYTES = 512
"""Of a sample id, what the index holds: PostgreSQL's takes 2.7 kB."""

MOST_NAME = 500
"""Characters of a name in a column."""

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def storable(text: str) -> str:
    """A name without what PostgreSQL refuses (NUL, lone surrogates), cut to `MOST_NAME`.

    Queries pass what they look for through this as well, so that a name finds itself.
    """
    cut = text[:MOST_NAME]
    if "\0" in cut:
        cut = cut.replace("\0", _REPLACEMENT)
    try:
        cut.encode()
    except UnicodeEncodeError:
        cut = "".join(_REPLACEMENT if "\ud800" <= one <= "\udfff" else one for one in cut)
    return cut


def bytes_of_id(sample_id: str) -> bytes:
    """Any text, lone surrogates included, as bytes that order as the text does.

    A pair of surrogates is the one character that it stands for, as in JSON, by which ids come.
    """
    try:
        return sample_id.encode()
    except UnicodeEncodeError:
        paired = sample_id.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
        return paired.encode("utf-8", "surrogatepass")


def id_of_bytes(found: bytes) -> str:
    """What `bytes_of_id` was given."""
    return found.decode("utf-8", "surrogatepass")


def after_prefix(prefix: bytes) -> bytes | None:
    """The least bytes that are greater than everything with this prefix; None if there are none."""
    kept = prefix.rstrip(b"\xff")
    return kept[:-1] + bytes([kept[-1] + 1]) if kept else None
