"""Errors as ``application/problem+json`` (RFC 9457)."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus

from fastapi.responses import JSONResponse


class ProblemResponse(JSONResponse):
    """An error response: status, standard title, and a detail about this request.

    Args:
        detail: one sentence on the error, without anything that the caller may not see.
        headers: additional headers, such as Allow or WWW-Authenticate.
    """

    media_type = "application/problem+json"

    def __init__(
        self, status: int, detail: str, *, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(
            {
                "type": "about:blank",
                "title": HTTPStatus(status).phrase,
                "status": status,
                "detail": detail,
            },
            status_code=status,
            headers=headers,
        )
