"""The interceptor that asks calls for the token; an asynchronous server needs its own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from refit_mx.control.auth import HEALTH, REFUSAL, WITHOUT_TOKEN, is_allowed
from refit_mx.grpc_listening import host_of
from refit_mx.listening import PeerLog

# grpc has no types.
Handler = Any
Details = Any


class TokenInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Refuses calls without the token, before their request is decoded; health stays open.

    Args:
        token: that calls must bring as ``authorization: Bearer``.
        log: that is told of peers that do not.
    """

    def __init__(self, token: str, log: PeerLog) -> None:
        self._token = token
        self._log = log

    async def intercept_service(
        self, continuation: Callable[[Details], Awaitable[Handler]], details: Details
    ) -> Handler:
        """Let the call through, or give the handler that refuses it."""
        if details.method.startswith(HEALTH) or is_allowed(
            self._token, details.invocation_metadata
        ):
            return await continuation(details)
        return grpc.unary_unary_rpc_method_handler(self._refuse)

    async def _refuse(self, request: object, context: Any) -> None:  # grpc has no types
        self._log.warn(host_of(context.peer()), WITHOUT_TOKEN)
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, REFUSAL)
