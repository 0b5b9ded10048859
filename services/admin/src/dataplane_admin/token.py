"""The bearer token that guards every route but the liveness probe."""

from __future__ import annotations

import hmac
import re
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from dataplane_admin.problem import ProblemResponse

MIN_TOKEN_LENGTH = 16
LIVENESS_PATH = "/healthz"

_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")  # token68 of RFC 9110, what a Bearer header can carry


def read_token(path: Path) -> str:
    """The token in the file at ``path``; white space around it does not belong to it.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it holds no token that is long enough and fits into a header. The message
            does not contain what was found.
    """
    text = path.read_bytes().decode("utf-8", errors="replace").strip()
    if len(text) < MIN_TOKEN_LENGTH or _TOKEN.fullmatch(text) is None:
        raise ValueError(
            f"token file {str(path)!r}: expected one token of at least {MIN_TOKEN_LENGTH} "
            "characters out of letters, digits and -._~+/, such as `openssl rand -hex 32` writes"
        )
    return text


class BearerTokenMiddleware:
    """Refuse requests without ``Authorization: Bearer <token>``, but for the liveness probe."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self.app = app
        self.token = token.encode("ascii")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] == "lifespan"
            or scope["path"] == LIVENESS_PATH
            or self._is_authorized(Headers(scope=scope).getlist("authorization"))
        ):
            await self.app(scope, receive, send)
            return
        refusal = ProblemResponse(
            401,
            "expected the header 'Authorization: Bearer <token>' with the token of the service",
            headers={"www-authenticate": "Bearer"},
        )
        await refusal(scope, receive, send)

    def _is_authorized(self, headers: list[str]) -> bool:
        if len(headers) != 1:
            return False
        scheme, _, given = headers[0].partition(" ")
        # Compared as bytes, because compare_digest refuses strings that are not ASCII.
        return scheme.lower() == "bearer" and hmac.compare_digest(
            given.strip().encode("latin-1"), self.token
        )
