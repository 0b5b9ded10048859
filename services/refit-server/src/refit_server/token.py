"""The interceptor that asks calls for the token; an asynchronous server needs its own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from refit_mx.control.auth import HEALTH, REFUSAL, is_allowed

# grpc has no types.
Handler = Any
Details = Any


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
