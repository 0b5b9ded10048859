"""Authentication of requests, and protection of changes against CSRF."""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass
from typing import Literal
from urllib.parse import quote

from fastapi import Request
from fastapi.responses import RedirectResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from dataplane_admin.web.login import (
    COOKIE,
    LOGIN_PATH,
    FailedLogins,
    Sessions,
    address_of,
    has_token,
    too_many_tokens,
)
from dataplane_admin.web.problem import ProblemResponse
from dataplane_admin.web.transport import OTLP_PREFIX

OPEN_PATHS = frozenset({"/healthz", "/readyz", LOGIN_PATH})
"""Paths without authentication: probes and the login page."""
OPEN_PREFIX = "/static/"
"""Style sheets and scripts, which the login page needs as well."""
CSRF_FIELD = "csrf"
CSRF_HEADER = "x-csrf-token"

_API_PREFIXES = ("/api/", OTLP_PREFIX, "/metrics")
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
_FORM = "application/x-www-form-urlencoded"


@dataclass(frozen=True)
class Caller:
    """The sender of a request.

    Attributes:
        csrf: CSRF value that the caller's forms must contain.
        name: name for the audit log, without secrets.
    """

    by: Literal["bearer", "session", "anybody"]
    csrf: str
    name: str


def caller_of(connection: HTTPConnection) -> Caller:
    """Return the caller of a request."""
    caller = connection.scope["state"]["caller"]
    assert isinstance(caller, Caller)
    return caller


class AccessMiddleware:
    """Middleware that refuses requests without token or session, and records the caller.

    Args:
        token: bearer token; None disables authentication.
        sessions: open sessions. The OTLP routes accept the token only.
    """

    def __init__(
        self,
        app: ASGIApp,
        token: str | None,
        sessions: Sessions,
        failed: FailedLogins,
        root_path: str,
    ) -> None:
        self.app = app
        self.failed = failed
        self.root_path = root_path
        self.token = token
        self.sessions = sessions
        # CSRF value of callers without a session; other origins cannot read the pages that contain
        # it.
        self.csrf = secrets.token_urlsafe(32)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        caller = self._caller(scope)
        path = scope["path"]
        if caller is None and not (path in OPEN_PATHS or path.startswith(OPEN_PREFIX)):
            refusal = _refusal(scope, self.root_path)
            if "authorization" in Headers(scope=scope) and not await self.failed.hold(scope):
                refusal = too_many_tokens()
            await refusal(scope, receive, send)
            return
        scope.setdefault("state", {})["caller"] = caller or self._anonymous(scope)
        await self.app(scope, receive, send)

    def _caller(self, scope: Scope) -> Caller | None:
        if self.token is None:
            return self._anonymous(scope)
        connection = HTTPConnection(scope)
        if has_token(connection.headers, self.token):
            return Caller("bearer", self.csrf, f"token from {address_of(scope)}")
        if scope["path"].startswith(OTLP_PREFIX):
            return None
        session = self.sessions.find(connection.cookies.get(COOKIE, ""))
        if session is None:
            return None
        return Caller("session", session.csrf, f"session {session.name} from {address_of(scope)}")

    def _anonymous(self, scope: Scope) -> Caller:
        return Caller("anybody", self.csrf, f"anonymous from {address_of(scope)}")


def wants_page(scope: Scope) -> bool:
    """Return whether a browser requests a page."""
    return (
        scope["type"] == "http"
        and scope["method"] == "GET"
        and "text/html" in Headers(scope=scope).get("accept", "")
        and not scope["path"].startswith(_API_PREFIXES)
    )


def _refusal(scope: Scope, root_path: str) -> Response:
    if wants_page(scope):
        path, query = scope["path"], scope["query_string"].decode("latin-1")
        target = f"{quote(path)}?{query}" if query else quote(path)
        return RedirectResponse(f"{root_path}{LOGIN_PATH}?next={quote(target, safe='')}", 303)
    return ProblemResponse(
        401,
        "expected the header 'Authorization: Bearer <token>' with the token of the service",
        headers={"www-authenticate": "Bearer"},
    )


class Forbidden(HTTPException):
    """A change that failed the CSRF check."""

    def __init__(self, detail: str) -> None:
        super().__init__(403, detail)


async def require_csrf(connection: HTTPConnection) -> None:
    """Refuse a change without the bearer header, unless it has an Origin and the CSRF value.

    A page of another site can make a browser send a form with cookies. It cannot read this
    service's pages, so it does not know the CSRF value of their forms. Exporters and the login are
    exempt: they send the token. Without a token, `OriginMiddleware` has already refused other
    origins. This is a dependency of the application, so that it covers every route.

    Raises:
        Forbidden: the CSRF value or the Origin is wrong or missing.
    """
    if not isinstance(connection, Request):  # a websocket
        return
    request = connection
    path, caller = request.url.path, caller_of(request)
    if (
        request.method in _SAFE_METHODS
        or path == LOGIN_PATH
        or path.startswith(OTLP_PREFIX)
        or caller.by == "bearer"
    ):
        return
    if "origin" not in request.headers:
        raise Forbidden(
            "Origin header: found none; browsers always send it. From any other client, send the "
            "header 'Authorization: Bearer <token>'; the service needs --token-file"
        )
    given = request.headers.get(CSRF_HEADER)
    if given is None and request.headers.get("content-type", "").partition(";")[0].strip() == _FORM:
        values = (await request.form()).getlist(CSRF_FIELD)
        given = str(values[0]) if len(values) == 1 else None
    if given is None or not hmac.compare_digest(
        given.encode("utf-8", "replace"), caller.csrf.encode("ascii")
    ):
        raise Forbidden(
            f"csrf: {'missing' if given is None else 'wrong value'}; reload the page and send its "
            f"CSRF value in the header {CSRF_HEADER} or the form field {CSRF_FIELD}; or send the "
            "header 'Authorization: Bearer <token>'"
        )
