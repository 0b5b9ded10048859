"""Who sends a request: the holder of the token, a session, or, without a token, anybody."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Literal
from urllib.parse import quote

from fastapi.responses import RedirectResponse
from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from dataplane_admin.body_limit import OTLP_PREFIX
from dataplane_admin.failed_logins import FailedLogins
from dataplane_admin.login import COOKIE, LOGIN_PATH, Sessions
from dataplane_admin.peer import address_of
from dataplane_admin.problem import ProblemResponse
from dataplane_admin.token import brings_token

LIVENESS_PATH = "/healthz"
READINESS_PATH = "/readyz"
OPEN_PATHS = frozenset({LIVENESS_PATH, READINESS_PATH, LOGIN_PATH})
"""What answers without a token: probes, and where one logs in."""
OPEN_PREFIX = "/static/"
"""The pages' style and scripts, of which the page to log in is made as well."""

_MACHINES = ("/api/", OTLP_PREFIX, "/metrics")


@dataclass(frozen=True)
class Caller:
    """Who sends a request.

    Attributes:
        by: how they are known.
        csrf: what a form of theirs has to carry.
        name: for the audit record, without any secret.
    """

    by: Literal["bearer", "session", "anybody"]
    csrf: str
    name: str


def caller_of(connection: HTTPConnection) -> Caller:
    """Who sends this request."""
    caller = connection.scope["state"]["caller"]
    assert isinstance(caller, Caller)
    return caller


class AccessMiddleware:
    """Refuse requests without the token or a session, and note who sends the others.

    Args:
        token: bearer token; None lets everybody in.
        failed: holds back the answers to wrong tokens.
        root_path: before the path of the page to log in.
        sessions: who is logged in. Exporters cannot be: their routes take the token alone.
    """

    def __init__(
        self,
        app: ASGIApp,
        token: str | None,
        sessions: Sessions,
        failed: FailedLogins,
        root_path: str = "",
    ) -> None:
        self.app = app
        self.failed = failed
        self.root_path = root_path
        self.token = token
        self.sessions = sessions
        # Of this process, for pages that nobody logs in to: other origins cannot read them.
        self.csrf = secrets.token_urlsafe(32)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        caller = self._caller(scope)
        path = scope["path"]
        if caller is None and not (path in OPEN_PATHS or path.startswith(OPEN_PREFIX)):
            if "authorization" in Headers(scope=scope):
                await self.failed.hold(address_of(scope))
            await _refusal(scope, self.root_path)(scope, receive, send)
            return
        scope.setdefault("state", {})["caller"] = caller or self._anybody(scope)
        await self.app(scope, receive, send)

    def _caller(self, scope: Scope) -> Caller | None:
        if self.token is None:
            return self._anybody(scope)
        connection = HTTPConnection(scope)
        if brings_token(connection.headers, self.token):
            return Caller("bearer", self.csrf, f"token from {address_of(scope)}")
        if scope["path"].startswith(OTLP_PREFIX):
            return None
        session = self.sessions.find(connection.cookies.get(COOKIE, ""))
        if session is None:
            return None
        return Caller("session", session.csrf, f"session {session.name} from {address_of(scope)}")

    def _anybody(self, scope: Scope) -> Caller:
        return Caller("anybody", self.csrf, f"anybody from {address_of(scope)}")


def _refusal(scope: Scope, root_path: str) -> Response:
    path = scope["path"]
    if (
        scope["type"] == "http"
        and scope["method"] == "GET"
        and "text/html" in Headers(scope=scope).get("accept", "")
        and not path.startswith(_MACHINES)
    ):
        query = scope["query_string"].decode("latin-1")
        target = f"{quote(path)}?{query}" if query else quote(path)
        return RedirectResponse(f"{root_path}{LOGIN_PATH}?next={quote(target, safe='')}", 303)
    return ProblemResponse(
        401,
        "expected the header 'Authorization: Bearer <token>' with the token of the service",
        headers={"www-authenticate": "Bearer"},
    )
