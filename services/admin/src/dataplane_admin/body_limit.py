"""No request body is read beyond a bound, whatever its headers promise.

What exporters send has bounds of its own, see `dataplane_admin.ingest`.
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dataplane_admin.problem import ProblemResponse

MOST_BODY = 1024 * 1024
"""Bytes."""
BODY_S = 30.0
"""That a body may take to arrive, in seconds."""
OTLP_PREFIX = "/v1/"


class BodyLimitMiddleware:
    """Refuse bodies of more than `MOST_BODY` bytes, but of OTLP requests."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(OTLP_PREFIX):
            await self.app(scope, receive, send)
            return
        told = Headers(scope=scope).get("content-length", "0")
        if not told.isdecimal() or int(told[:20]) > MOST_BODY:
            refusal = ProblemResponse(413, _too_large(told), headers={"connection": "close"})
            await refusal(scope, receive, send)
            return
        got = 0

        async def receive_bounded() -> Message:
            nonlocal got
            message = await receive()
            got += len(message.get("body", b""))
            if got > MOST_BODY:
                raise HTTPException(413, _too_large("more"), {"connection": "close"})
            return message

        await self.app(scope, receive_bounded, send)


def _too_large(found: str) -> str:
    return f"body: found {found[:20]} bytes; expected at most {MOST_BODY}"
