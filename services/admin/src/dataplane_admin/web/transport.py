"""HTTP middleware: HEAD, root path, body limit and security headers."""

from __future__ import annotations

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dataplane_admin.web.problem import ProblemResponse

OTLP_PREFIX = "/v1/"
MAX_BODY_BYTES = 1024 * 1024

SECURITY_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    # A stricter policy would hide the origin of the service's own forms.
    "referrer-policy": "same-origin",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
NO_STORE = {"cache-control": "no-store"}
"""Header of answers that do not set their own cache control."""


class SecurityHeadersMiddleware:
    """Middleware that sets `SECURITY_HEADERS` and `NO_STORE` on every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(SECURITY_HEADERS)
                for name, value in NO_STORE.items():
                    headers.setdefault(name, value)
            await send(message)

        await self.app(scope, receive, send_with_headers)


class RootPathMiddleware:
    """Middleware that removes the root path from requests. No route may begin with it.

    Further middleware and routes see paths without it, such as ``/v1/traces``. Links, redirects and
    paths of cookies have the root path. So proxies may remove the prefix
    (``proxy_pass http://host:8080/;``) or pass it on.
    """

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self.app = app
        self.root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.root_path and scope["type"] != "lifespan":
            path = scope["path"]
            if path == self.root_path or path.startswith(f"{self.root_path}/"):
                # raw_path would contradict path; nothing here reads it.
                scope = {**scope, "path": path[len(self.root_path) :] or "/", "raw_path": None}
        await self.app(scope, receive, send)


class HeadMiddleware:
    """Middleware that answers HEAD as GET without the body (RFC 9110, section 9.3.2).

    The response ends after its headers, so that an endless stream does not block it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self.app(scope, receive, send)
            return
        answered = False

        async def send_headers(message: Message) -> None:
            nonlocal answered
            if message["type"] == "http.response.start":
                answered = True
                await send(message)
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        async def receive_until_answered() -> Message:
            return {"type": "http.disconnect"} if answered else await receive()

        await self.app({**scope, "method": "GET"}, receive_until_answered, send_headers)


class BodyLimitMiddleware:
    """Middleware that refuses bodies above `MAX_BODY_BYTES`, whatever their headers declare.

    Telemetry has separate limits, see `dataplane_admin.Limits`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(OTLP_PREFIX):
            await self.app(scope, receive, send)
            return
        length = Headers(scope=scope).get("content-length", "0")
        if not length.isdecimal() or int(length[:20]) > MAX_BODY_BYTES:
            refusal = ProblemResponse(413, _too_large(length), headers={"connection": "close"})
            await refusal(scope, receive, send)
            return
        received_bytes = 0

        async def receive_bounded() -> Message:
            nonlocal received_bytes
            message = await receive()
            received_bytes += len(message.get("body", b""))
            if received_bytes > MAX_BODY_BYTES:
                raise HTTPException(413, _too_large("more"), {"connection": "close"})
            return message

        await self.app(scope, receive_bounded, send)


def _too_large(length: str) -> str:
    return f"body: found {length[:20]} bytes; expected at most {MAX_BODY_BYTES}"
