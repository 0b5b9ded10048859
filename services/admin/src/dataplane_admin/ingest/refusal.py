"""Refusals of requests, which are answered with an error, and of single records."""

from __future__ import annotations

from http import HTTPStatus


class Refusal(Exception):
    """An error of a request.

    Attributes:
        status: HTTP status of the answer.
        retry_s: seconds until a retry; None to send no Retry-After.
    """

    def __init__(self, status: HTTPStatus, message: str, retry_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_s = retry_s


def too_large(limit: int, what: str = "the body") -> Refusal:
    """Return the refusal of a body that is too long."""
    return Refusal(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        f"{what} is longer than {limit} bytes; send fewer records per request",
    )


class RecordRefused(Exception):
    """A rejected record; the text is the reason."""
