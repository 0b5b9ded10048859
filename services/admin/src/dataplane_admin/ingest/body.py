"""Bodies of requests, read and inflated up to limits."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus

from dataplane_admin.ingest.limits import Limits
from dataplane_admin.ingest.refusal import Refusal, too_large
from observability.wire import BodyTooLong, gunzip


class RequestMemory:
    """Memory of all requests that are being read or decoded. For one event loop."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._reserved_bytes = 0

    @contextmanager
    def reservation(self) -> Iterator[Callable[[int], None]]:
        """Yield a function that reserves bytes for one request; they are released at the end.

        It raises `Refusal` if the limit is exceeded.
        """
        reserved_bytes = 0

        def reserve(nbytes: int) -> None:
            nonlocal reserved_bytes
            if self._reserved_bytes + nbytes > self._limits.waiting_bytes:
                raise Refusal(
                    HTTPStatus.SERVICE_UNAVAILABLE,
                    f"requests in progress hold {self._reserved_bytes} of at most "
                    f"{self._limits.waiting_bytes} bytes; retry",
                    retry_s=1.0,
                )
            self._reserved_bytes += nbytes
            reserved_bytes += nbytes

        try:
            yield reserve
        finally:
            self._reserved_bytes -= reserved_bytes


async def read_body(
    chunks: AsyncIterator[bytes],
    declared: str | None,
    reserve: Callable[[int], None],
    limits: Limits,
) -> bytes:
    """Read a body as it was sent; ``declared`` is its Content-Length.

    Raises Refusal if the body is too long, or too many bytes are being read at once.
    """
    if _number(declared) > limits.body_bytes:
        raise too_large(limits.body_bytes)
    parts = []
    length = 0
    async for chunk in chunks:
        length += len(chunk)
        if length > limits.body_bytes:
            raise too_large(limits.body_bytes)
        reserve(len(chunk))
        parts.append(chunk)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _number(declared: str | None) -> int:
    """Return the number in a header: 0 if it is invalid, a large one if it has too many digits."""
    if declared is None or not declared.isascii() or not declared.isdecimal():
        return 0
    return int(declared) if len(declared) < 19 else 1 << 62


def inflate(body: bytes, encoding: str, limits: Limits) -> bytes:
    """Decompress a body, never beyond the limit.

    Raises Refusal if the encoding is unknown, or the body is invalid or too long.
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
    try:
        return gunzip(body, limits.inflated_bytes)
    except BodyTooLong:
        raise too_large(limits.inflated_bytes, "the inflated body") from None
    except ValueError as error:
        raise Refusal(HTTPStatus.BAD_REQUEST, str(error)) from error
