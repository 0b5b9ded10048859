"""A request that is answered with an error."""

from __future__ import annotations

from http import HTTPStatus


class Refusal(Exception):
    """What is wrong with a request.

    Attributes:
        status: of the answer.
        retry_s: when to come again, in seconds; None if the same request would fail again.
    """

    def __init__(self, status: HTTPStatus, message: str, retry_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_s = retry_s


def too_large(limit: int, what: str = "the body") -> Refusal:
    """For what is longer than it may be."""
    return Refusal(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        f"{what} is longer than {limit} bytes; send fewer records a request",
    )
