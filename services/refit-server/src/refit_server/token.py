"""The token that calls must bring, from a file; and the interceptor that asks for it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc

from refit_mx.control.auth import HEALTH, REFUSAL, is_allowed

LEAST_CHARACTERS = 16

# grpc has no types.
Handler = Any
Details = Any


def read_token(path: Path) -> str:
    """The token in a file, without the white space around it.

    Raises:
        ValueError: the file cannot be read, or what it has is no token. The token is not named.
    """
    try:
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeError) as error:
        raise ValueError(f"token file {str(path)!r}: {error}") from None
    if len(token) < LEAST_CHARACTERS or not token.isprintable() or " " in token:
        raise ValueError(
            f"token file {str(path)!r}: {len(token)} characters; expected one line of at least "
            f"{LEAST_CHARACTERS} visible ASCII characters"
        )
    return token


class TokenInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Refuses calls without the token, before their request is decoded; health stays open.

    Args:
        token: that calls must bring as ``authorization: Bearer``.
    """

    def __init__(self, token: str) -> None:
        self._token = token

    async def intercept_service(
        self, continuation: Callable[[Details], Awaitable[Handler]], details: Details
    ) -> Handler:
        """Let the call through, or give the handler that refuses it."""
        if details.method.startswith(HEALTH) or is_allowed(
            self._token, details.invocation_metadata
        ):
            return await continuation(details)
        return grpc.unary_unary_rpc_method_handler(_refuse)


async def _refuse(request: object, context: Any) -> None:  # grpc has no types
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, REFUSAL)
