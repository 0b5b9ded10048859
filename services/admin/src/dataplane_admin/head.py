"""HEAD, answered as GET without the body (RFC 9110, section 9.3.2)."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class HeadMiddleware:
    """Let the inner application answer a HEAD request as a GET, and keep the body back.

    The response ends with its headers, so that a stream without an end is not waited for.
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
