"""Logging in with a browser: the token once, then a cookie that names a session.

Sessions live in memory: a restart ends them all. A session is kept under the digest of its id, so
that neither a dump of the table nor a name in the audit record gives the cookie away.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse, Response

from dataplane_admin.failed_logins import FailedLogins
from dataplane_admin.peer import address_of
from dataplane_admin.problem import ProblemResponse

COOKIE = "dataplane_admin"
LOGIN_PATH = "/login"
LOGOUT_PATH = "/logout"
SESSION_S = 12 * 3600.0
MOST_SESSIONS = 1_000


@dataclass(frozen=True)
class Session:
    """One login.

    Attributes:
        name: tells it from others, in the audit record for example; gives no right to anything.
        csrf: what its forms carry.
        ends_s: when it ends, by the clock of its `Sessions`.
    """

    name: str
    csrf: str
    ends_s: float


class Sessions:
    """Who is logged in: at most `MOST_SESSIONS`, the oldest of which make room."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._lock = threading.Lock()

    def begin(self) -> str:
        """A new session; gives the value of its cookie."""
        value = secrets.token_urlsafe(32)
        digest = _digest(value)
        session = Session(digest[:8], secrets.token_urlsafe(32), self._clock() + SESSION_S)
        with self._lock:
            self._sessions[digest] = session
            while len(self._sessions) > MOST_SESSIONS:
                self._sessions.popitem(last=False)
        return value

    def find(self, value: str) -> Session | None:
        """The session of a cookie, None if there is none or it has ended."""
        digest = _digest(value)
        with self._lock:
            session = self._sessions.get(digest)
            if session is not None and session.ends_s <= self._clock():
                del self._sessions[digest]
                return None
        return session

    def end(self, value: str) -> None:
        """End the session of a cookie, if there is one."""
        with self._lock:
            self._sessions.pop(_digest(value), None)


def login_router(
    token: str, sessions: Sessions, failed: FailedLogins, root_path: str = ""
) -> APIRouter:
    """POST /login and /logout; the page with the form is not here."""
    router = APIRouter(include_in_schema=False)

    @router.post(LOGIN_PATH)
    async def login(request: Request) -> Response:
        form = await request.form(max_files=0, max_fields=10)
        given, target = form.get("token"), _local(form.get("next"))
        peer = address_of(request.scope)
        for_people = "text/html" in request.headers.get("accept", "")
        again = f"{root_path}{LOGIN_PATH}?next={quote(target)}&failed="
        if failed.has_too_many(peer):
            if for_people:
                return RedirectResponse(f"{again}often", 303)
            return ProblemResponse(
                429,
                "token: too many wrong ones from this address; try again in a moment",
                headers={"retry-after": "1"},
            )
        if not isinstance(given, str) or not hmac.compare_digest(
            given.strip().encode("utf-8", "replace"), token.encode("ascii")
        ):
            await failed.hold(peer)
            if for_people:
                return RedirectResponse(f"{again}1", 303)
            return ProblemResponse(401, "token: found another one than that of the service")
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
    """Whether the browser speaks https, be it to a proxy."""
    return request.url.scheme == "https" or request.headers.get("origin", "").startswith("https:")


def _local(target: object) -> str:
    """A path of this service to go on to; ``/`` in place of anything else."""
    if not isinstance(target, str) or not target.startswith("/") or len(target) > 8_192:
        return "/"
    # Browsers take a backslash for a slash, and leave out tabs and line breaks.
    if target.startswith(("//", "/\\")) or any(ord(one) < 0x20 for one in target):
        return "/"
    parts = urlsplit(target)
    return "/" if parts.scheme or parts.netloc or parts.path == LOGIN_PATH else target
