"""Error handlers: every error is a problem+json with one sentence on what went wrong.

A browser gets a page for an unknown path, and for a page whose telemetry cannot be read.
"""

from __future__ import annotations

from collections.abc import Callable

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from dataplane_admin.models import encodable_text
from dataplane_admin.service import ServiceError
from dataplane_admin.store import StoreError
from dataplane_admin.web import NO_STORE, SECURITY_HEADERS, ProblemResponse, wants_page
from observability.views import printable

_RETRY = {"retry-after": "2"}
# Maximum number of invalid parameters in one message, and characters of a name or value.
_MAX_REASONS = 5
_MAX_CHARACTERS = 60


def add_error_handlers(app: FastAPI, page: Callable[[Request, int, str], Response]) -> None:
    """Answer every error of a route of ``app``.

    ``page`` returns the page of an error, from its status and one sentence.
    """

    async def on_store_error(request: Request, error: Exception) -> Response:
        if wants_page(request.scope):
            return await run_in_threadpool(page, request, 503, str(error))
        return await _on_store_error(request, error)

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 404 and wants_page(request.scope):
            detail = f"no such path: {request.url.path[:200]}"
            return await run_in_threadpool(page, request, 404, detail)
        return await _on_http_error(request, error)

    app.add_exception_handler(ServiceError, _on_service_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(StoreError, on_store_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(Exception, _on_failure)


async def _on_service_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ServiceError)
    headers = _RETRY if error.status in (503, 504) else None
    return ProblemResponse(error.status, str(encodable_text(str(error))), headers=headers)


async def _on_store_error(_request: Request, error: Exception) -> Response:
    return ProblemResponse(503, str(encodable_text(str(error))), headers=_RETRY)


async def _on_invalid(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    reasons = []
    for item in error.errors()[:_MAX_REASONS]:
        place = ".".join(printable(part) for part in item["loc"] if part not in ("query", "body"))
        shown = "nothing" if item["type"] == "missing" else _shown(item.get("input"))
        reasons.append(
            f"{place[:_MAX_CHARACTERS] or 'body'}: found {shown}; expected: {item['msg']}"
        )
    return ProblemResponse(422, str(encodable_text("; ".join(reasons))))


def _shown(value: object) -> str:
    text = printable(value if isinstance(value, str | int | float | bool | None) else type(value))
    return repr(text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}…")


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    request_line = printable(f"{request.method} {request.url.path[:200]}")
    problem = "no such path" if error.status_code == 404 else error.detail
    hint = _otlp_hint(request) if error.status_code in (404, 405) else ""
    headers = dict(error.headers or {})
    if headers.get("allow", headers.get("Allow")) == "GET":
        headers = {"allow": "GET, HEAD"}
    return ProblemResponse(error.status_code, f"{request_line}: {problem}{hint}", headers=headers)


def _otlp_hint(request: Request) -> str:
    """Return a hint with the right path if an exporter sent to a wrong one, else an empty text."""
    path = request.url.path.lower()
    if request.method != "POST" or path.startswith(("/api/v1/actions/", "/actions/")):
        return ""
    kinds = [kind for kind in ("traces", "logs", "metrics") if kind.removesuffix("s") in path]
    root = request.app.state.settings.root_path
    right = " or ".join(f"{root}/v1/{kind}" for kind in kinds or ("traces", "logs", "metrics"))
    return f"; send OTLP over HTTP to {right}"


async def _on_failure(_request: Request, _error: Exception) -> Response:
    # This answer bypasses the middleware, so it sets the headers itself.
    return ProblemResponse(
        500,
        "internal error; see the service's log",
        headers={**SECURITY_HEADERS, **NO_STORE},
    )
