"""Login with the token, and sessions of browsers.

Sessions are in memory: a restart ends them all. A session is stored under the digest of its id, so
that neither a memory dump nor the audit log reveals the cookie.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import threading
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

import structlog
from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse, Response
from starlette.datastructures import Headers
from starlette.types import Scope

from dataplane_admin.web.problem import ProblemResponse
from dataplane_core.peer_log import PeerLog

COOKIE = "dataplane_admin"
LOGIN_PATH = "/login"
LOGOUT_PATH = "/logout"
SESSION_S = 12 * 3600.0
MAX_SESSIONS = 1_000
MAX_HELD = 5
"""Maximum number of delayed answers per address; further wrong tokens are refused at once."""


def address_of(scope: Scope) -> str:
    """Return the address of the sender, or of its proxy, without a port."""
    client = scope.get("client")
    return str(client[0]) if client else "an unknown address"


def has_token(headers: Headers, token: str | None) -> bool:
    """Return whether a request has exactly one Authorization header, with the token."""
    given = headers.getlist("authorization")
    if len(given) != 1 or token is None:
        return False
    scheme, _, value = given[0].partition(" ")
    # Compared as bytes, because compare_digest refuses strings that are not ASCII.
    return scheme.lower() == "bearer" and hmac.compare_digest(
        value.strip().encode("latin-1"), token.encode("ascii")
    )


class FailedLogins:
    """Delays of the answers to wrong tokens, at most `MAX_HELD` per address. For one event loop.

    Requests with the right token are never delayed or refused: behind a proxy all clients have one
    address, and guesses by one client must not block the others.
    """

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self._held: Counter[str] = Counter()
        self._log = PeerLog(structlog.get_logger("dataplane_admin"))

    async def hold(self, scope: Scope) -> bool:
        """Wait until a wrong token of this sender may be answered; return False if too many wait.

        The answer is then `too_many_tokens`.
        """
        peer = address_of(scope)
        if self._held[peer] >= MAX_HELD:
            return False
        self._log.warn("wrong_token", peer)
        self._held[peer] += 1
        try:
            await asyncio.sleep(self._delay_s)
        finally:
            self._held[peer] -= 1
            if not self._held[peer]:
                del self._held[peer]
        return True


def too_many_tokens() -> Response:
    """Return the refusal of a wrong token from an address with too many of them."""
    return ProblemResponse(
        429,
        "token: too many wrong tokens from this address; retry in a moment",
        headers={"retry-after": "1"},
    )


@dataclass(frozen=True)
class Session:
    """A session of a browser.

    Attributes:
        name: name for the audit log; it is not a credential.
        ends_s: its end by `time.monotonic`.
    """

    name: str
    csrf: str
    ends_s: float


class Sessions:
    """Open sessions, at most `MAX_SESSIONS`; new ones replace the oldest."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._lock = threading.Lock()

    def begin(self) -> str:
        """Start a session and return the value of its cookie."""
        value = secrets.token_urlsafe(32)
        digest = _digest(value)
        session = Session(digest[:8], secrets.token_urlsafe(32), time.monotonic() + SESSION_S)
        with self._lock:
            self._sessions[digest] = session
            while len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)
        return value

    def find(self, value: str) -> Session | None:
        """Return the session of a cookie, None if it is unknown or expired."""
        digest = _digest(value)
        with self._lock:
            session = self._sessions.get(digest)
            if session is not None and session.ends_s <= time.monotonic():
                del self._sessions[digest]
                return None
        return session

    def end(self, value: str) -> None:
        """End the session of a cookie, if there is one."""
        with self._lock:
            self._sessions.pop(_digest(value), None)


def login_router(token: str, sessions: Sessions, failed: FailedLogins, root_path: str) -> APIRouter:
    """Return the routes ``POST /login`` and ``POST /logout``."""
    router = APIRouter(include_in_schema=False)

    @router.post(LOGIN_PATH)
    async def login(request: Request) -> Response:
        form = await request.form(max_files=0, max_fields=10)
        given, target = form.get("token"), _local(form.get("next"))
        from_browser = "text/html" in request.headers.get("accept", "")
        if not isinstance(given, str) or not hmac.compare_digest(
            given.strip().encode("utf-8", "replace"), token.encode("ascii")
        ):
            held = await failed.hold(request.scope)
            if from_browser:
                reason = "1" if held else "often"
                retry_url = f"{root_path}{LOGIN_PATH}?next={quote(target)}&failed={reason}"
                return RedirectResponse(retry_url, 303)
            if not held:
                return too_many_tokens()
            return ProblemResponse(401, "token: wrong token; expected the service's token")
        answer = RedirectResponse(f"{root_path}{target}", 303)
        answer.set_cookie(
            COOKIE,
            sessions.begin(),
            max_age=int(SESSION_S),
            path=root_path or "/",
            httponly=True,
            samesite="strict",
            secure=_is_https(request),
        )
        return answer

    @router.post(LOGOUT_PATH)
    async def logout(request: Request) -> Response:
        sessions.end(request.cookies.get(COOKIE, ""))
        answer = RedirectResponse(f"{root_path}{LOGIN_PATH}", 303)
        answer.delete_cookie(COOKIE, path=root_path or "/", httponly=True, samesite="strict")
        return answer

    return router


def _digest(value: str) -> str:
    return hashlib.sha256(value.encode("utf-8", "replace")).hexdigest()


def _is_https(request: Request) -> bool:
    """Return whether the browser uses https, possibly to a proxy."""
    return request.url.scheme == "https" or request.headers.get("origin", "").startswith("https:")


def _local(target: object) -> str:
    """Return ``target`` if it is a path of this service, else ``/``."""
    if not isinstance(target, str) or not target.startswith("/") or len(target) > 8_192:
        return "/"
    # Browsers treat a backslash as a slash, and drop tabs and line breaks.
    if target.startswith(("//", "/\\")) or any(ord(character) < 0x20 for character in target):
        return "/"
    parts = urlsplit(target)
    return "/" if parts.scheme or parts.netloc or parts.path == LOGIN_PATH else target
