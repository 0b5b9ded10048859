"""External text in a database: sample ids as bytes, names in a form that databases accept."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

_STEM_BYTES = 36
_HEAD_BYTES = 512

MAX_NAME = 500
"""Maximum length of a stored name in characters."""

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def bounded(name: str, limit: int) -> str:
    """Return a name of at most ``limit`` characters; the end of a longer one is a hash of it.

    So two long names with the same beginning stay different.
    """
    if len(name) <= limit:
        return name
    digest = hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=6).hexdigest()
    return f"{name[: limit - len(digest) - 1]}~{digest}"


def storable(name: str) -> str:
    """Return a name `bounded` to `MAX_NAME`, without characters that PostgreSQL rejects.

    These are NUL and lone surrogates. Queries apply it to the names that they search for as well.
    """
    return excerpt(bounded(name, MAX_NAME))


def excerpt(text: str) -> str:
    """Return the first `MAX_NAME` characters of a text that identifies nothing, as `storable`."""
    cut = text[:MAX_NAME]
    if "\0" in cut:
        cut = cut.replace("\0", _REPLACEMENT)
    try:
        cut.encode()
    except UnicodeEncodeError:
        cut = "".join(
            _REPLACEMENT if "\ud800" <= character <= "\udfff" else character for character in cut
        )
    return cut


def one_line(text: str) -> str:
    """Return a name as `storable` does, on one line."""
    return storable(text.replace("\n", " "))


def lines_of(texts: Iterable[str], limit: int) -> str:
    """Return the distinct texts, sorted, each as `one_line` between two line breaks.

    A query finds a text by searching for it with its line breaks. Texts beyond ``limit`` are left
    out; without any the result is empty.
    """
    lines = sorted(set(map(one_line, texts)))[:limit]
    return "\n".join(["", *lines, ""]) if lines else ""


def texts_in(lines: str) -> list[str]:
    """Return the texts from `lines_of`."""
    return lines.split("\n")[1:-1]


def bytes_of_id(sample_id: str) -> bytes:
    """Encode any text, lone surrogates included, as bytes with the same order.

    A pair of surrogates is encoded as its character, as in JSON, the format of reported ids.
    """
    try:
        return sample_id.encode()
    except UnicodeEncodeError:
        paired = sample_id.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
        return paired.encode("utf-8", "surrogatepass")


def id_of_bytes(encoded: bytes) -> str:
    """Decode what `bytes_of_id` returned."""
    return encoded.decode("utf-8", "surrogatepass")


def split_id(sample: bytes) -> tuple[bytes, bytes, bytes]:
    """Return stem, head and tail of a sample id.

    A long id has a stem of the length of a UUID, with which many ids of a group begin. Stem and
    head are indexed together, so the head is bounded: PostgreSQL's index allows 2.7 kB.
    """
    size = _STEM_BYTES if len(sample) > _STEM_BYTES else 0
    return sample[:size], sample[size : size + _HEAD_BYTES], sample[size + _HEAD_BYTES :]


def after_prefix(prefix: bytes) -> bytes | None:
    """Return the smallest bytes above everything with this prefix; None if there are none."""
    trimmed = prefix.rstrip(b"\xff")
    return trimmed[:-1] + bytes([trimmed[-1] + 1]) if trimmed else None


def shortened(sample: bytes, group: str) -> bytes:
    """Return a sample id as it is stored with its group.

    Many trainers begin the ids of samples with the id of their group, which is left out:

        id b"7f3a_g2" of group "7f3a"  ->  b"\\1_g2"
        id b"s-20"    of group "7f3a"  ->  b"\\0s-20"
    """
    prefix = bytes_of_id(group)
    return b"\1" + sample[len(prefix) :] if sample.startswith(prefix) else b"\0" + sample


def lengthened(stored: bytes, group: str) -> bytes:
    """Return the sample id that `shortened` encoded."""
    return bytes_of_id(group) + stored[1:] if stored[:1] == b"\1" else stored[1:]
