"""Which requests that change something were meant by who seems to send them.

A page of another site can make a browser send a form, cookies included. It can read none of our
pages, so it does not know the value that a form of ours carries.
"""

from __future__ import annotations

import hmac
from urllib.parse import parse_qs

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dataplane_admin.access import caller_of
from dataplane_admin.body_limit import OTLP_PREFIX
from dataplane_admin.login import LOGIN_PATH
from dataplane_admin.problem import ProblemResponse

CSRF_FIELD = "csrf"
CSRF_HEADER = "x-csrf-token"

_HARMLESS = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
_FORM = "application/x-www-form-urlencoded"


def csrf_of(connection: HTTPConnection) -> str:
    """The value that forms of the page which answers this request carry, or scripts send back.

    Forms carry it in the field `CSRF_FIELD`, scripts in the header `CSRF_HEADER`.
    """
    return caller_of(connection).csrf


class CsrfMiddleware:
    """Refuse to change anything without the bearer header, or else our Origin and the csrf value.

    Exporters and the login are no part of this: they bring the token itself, and where there is
    none, a foreign Origin has been refused before.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] != "http"
            or scope["method"] in _HARMLESS
            or scope["path"] == LOGIN_PATH
            or scope["path"].startswith(OTLP_PREFIX)
            or caller_of(HTTPConnection(scope)).by == "bearer"
            # Nothing is changed where no route takes the request; the router says what is wrong.
            or not _is_taken(scope)
        ):
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if "origin" not in headers:
            await _refused("Origin header: found none; expected the address of this service")(
                scope, receive, send
            )
            return
        given = headers.get(CSRF_HEADER)
        if given is None and headers.get("content-type", "").partition(";")[0].strip() == _FORM:
            body = await _read(receive)
            given = _field(body)
            receive = _again(body, receive)
        expected = caller_of(HTTPConnection(scope)).csrf
        if given is None or not hmac.compare_digest(
            given.encode("utf-8", "replace"), expected.encode("ascii")
        ):
            await _refused(
                f"csrf: found {'none' if given is None else 'another one'}; expected the value of "
                f"the page, in the header {CSRF_HEADER} or the form field {CSRF_FIELD}, or the "
                "header 'Authorization: Bearer <token>'"
            )(scope, receive, send)
            return
        await self.app(scope, receive, send)


def _is_taken(scope: Scope) -> bool:
    """Whether a route answers this method at this path."""
    return any(route.matches(scope)[0] is Match.FULL for route in scope["app"].routes)


def _refused(detail: str) -> ProblemResponse:
    return ProblemResponse(403, detail)


async def _read(receive: Receive) -> bytes:
    """The body; what is longer than `MOST_BODY` was refused further out."""
    parts = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if message["type"] != "http.request" or not message.get("more_body", False):
            return b"".join(parts)


def _again(body: bytes, receive: Receive) -> Receive:
    """A ``receive`` that gives the body first."""
    told = False

    async def replay() -> Message:
        nonlocal told
        if told:
            return await receive()
        told = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


def _field(body: bytes) -> str | None:
    try:
        values = parse_qs(body.decode("utf-8"), max_num_fields=100).get(CSRF_FIELD, [])
    except ValueError:
        return None
    return values[0] if len(values) == 1 else None
