"""Every error as problem+json, saying what was found and what was expected."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from dataplane_admin.answers import AnswerError
from dataplane_admin.answers.models import whole_text
from dataplane_admin.problem import ProblemResponse
from dataplane_admin.security_headers import NOT_STORED, SECURITY_HEADERS
from dataplane_admin.store import StoreError
from observability.views import printable

_RETRY = {"retry-after": "2"}
# Of what is wrong with one request.
_MOST_TOLD = 5
_SHOWN = 60


def add_error_handlers(app: FastAPI) -> None:
    """Answer every failure of a route of ``app`` as a problem."""
    app.add_exception_handler(AnswerError, _on_answer_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(StoreError, _on_store_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_failure)


async def _on_answer_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, AnswerError)
    headers = _RETRY if error.status in (503, 504) else None
    return ProblemResponse(error.status, str(whole_text(str(error))), headers=headers)


async def _on_store_error(_request: Request, error: Exception) -> Response:
    return ProblemResponse(503, str(whole_text(str(error))), headers=_RETRY)


async def _on_invalid(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    told = []
    for one in error.errors()[:_MOST_TOLD]:
        place = ".".join(printable(part) for part in one["loc"] if part not in ("query", "body"))
        shown = "nothing" if one["type"] == "missing" else _shown(one.get("input"))
        told.append(f"{place[:_SHOWN] or 'body'}: found {shown}; expected: {one['msg']}")
    return ProblemResponse(422, str(whole_text("; ".join(told))))


def _shown(value: object) -> str:
    text = printable(value if isinstance(value, str | int | float | bool | None) else type(value))
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…")


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    asked = printable(f"{request.method} {request.url.path[:200]}")
    found = "there is nothing at this path" if error.status_code == 404 else error.detail
    hint = _otlp_hint(request) if error.status_code in (404, 405) else ""
    headers = dict(error.headers or {})
    if headers.get("allow", headers.get("Allow")) == "GET":
        headers = {"allow": "GET, HEAD"}
    return ProblemResponse(error.status_code, f"{asked}: {found}{hint}", headers=headers)


def _otlp_hint(request: Request) -> str:
    """Return where an exporter's request to a wrong path belongs; empty for other requests."""
    path = request.url.path.lower()
    if request.method != "POST" or path.startswith(("/api/v1/actions/", "/actions/")):
        return ""
    kinds = [kind for kind in ("traces", "logs", "metrics") if kind.removesuffix("s") in path]
    root = request.app.state.settings.root_path
    right = " or ".join(f"{root}/v1/{kind}" for kind in kinds or ("traces", "logs", "metrics"))
    return f"; OTLP over HTTP is sent to {right}"


async def _on_failure(_request: Request, _error: Exception) -> Response:
    # Answers from outside the middleware, so it brings the headers along.
    return ProblemResponse(
        500,
        "the service failed; its log says why",
        headers={**SECURITY_HEADERS, **NOT_STORED},
    )
