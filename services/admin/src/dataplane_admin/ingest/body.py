"""The body of a request: read up to a limit, and inflated up to a limit."""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from http import HTTPStatus

from dataplane_admin.ingest.limits import Limits
from dataplane_admin.ingest.refusal import Refusal, too_large

_GZIP = 31  # zlib's name for it


class Intake:
    """Bounds what all requests together hold in memory. Of one event loop."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._held = 0

    @contextmanager
    def room(self) -> Iterator[Room]:
        """Room of one request, given back at the end."""
        room = Room(self)
        try:
            yield room
        finally:
            self._held -= room.held

    def take(self, nbytes: int) -> None:
        """Count so many bytes more.

        Raises:
            Refusal: that is too much.
        """
        if self._held + nbytes > self._limits.waiting_bytes:
            raise Refusal(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"requests of {self._held} bytes are being read, expected at most "
                f"{self._limits.waiting_bytes}; send it again",
                retry_s=1.0,
            )
        self._held += nbytes


class Room:
    """What one request holds of an `Intake`."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake
        self.held = 0

    def take(self, nbytes: int) -> None:
        """As `Intake.take`."""
        self._intake.take(nbytes)
        self.held += nbytes


async def read_body(
    chunks: AsyncIterator[bytes], declared: str | None, room: Room, limits: Limits
) -> bytes:
    """The body as it was sent.

    Args:
        chunks: as they arrive.
        declared: Content-Length, None if there is none.
        room: that it takes up.
        limits: how long it may be.

    Raises:
        Refusal: it is too long, or too much is being read at once.
    """
    if _number(declared) > limits.body_bytes:
        raise too_large(limits.body_bytes)
    parts = []
    length = 0
    async for chunk in chunks:
        length += len(chunk)
        if length > limits.body_bytes:
            raise too_large(limits.body_bytes)
        room.take(len(chunk))
        parts.append(chunk)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _number(declared: str | None) -> int:
    """Of a header; 0 where it tells none, a large one where it has too many digits."""
    if declared is None or not declared.isascii() or not declared.isdecimal():
        return 0
    return int(declared) if len(declared) < 19 else 1 << 62


def inflate(body: bytes, encoding: str, limits: Limits) -> bytes:
    """The body without its compression; never more than the limit is inflated.

    Raises:
        Refusal: the encoding is not known, the body is not of it, or too long.
    """
    if encoding == "identity":
        if len(body) > limits.inflated_bytes:
            raise too_large(limits.inflated_bytes)
        return body
    if encoding != "gzip":
        raise Refusal(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            f"Content-Encoding {encoding[:40]!r}: expected gzip or identity",
        )
    plain = bytearray()
    rest = body
    try:
        while rest:  # RFC 1952: one member or several, one after the other
            gzip = zlib.decompressobj(wbits=_GZIP)
            plain += gzip.decompress(rest, limits.inflated_bytes + 1 - len(plain))
            if len(plain) > limits.inflated_bytes:
                raise too_large(limits.inflated_bytes, "the inflated body")
            if not gzip.eof:
                raise Refusal(HTTPStatus.BAD_REQUEST, "the gzip stream ends before its end")
            rest = gzip.unused_data
    except zlib.error as error:
        raise Refusal(HTTPStatus.BAD_REQUEST, f"the body is not gzip: {error}") from error
    return bytes(plain)
