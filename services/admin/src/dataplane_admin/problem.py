"""Errors as ``application/problem+json`` (RFC 9457)."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus

from fastapi.responses import JSONResponse


class ProblemResponse(JSONResponse):
    """One error: the status, its standard title, and what was wrong with this request.

    Args:
        status: HTTP status code.
        detail: what was found and what is expected. Must not contain what the caller may not see.
        headers: further headers, such as Allow or WWW-Authenticate.
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
