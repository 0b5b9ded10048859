"""The token of calls, as ModelExpress sends it: ``authorization: Bearer TOKEN``."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterable
from typing import Any

import grpc

HEADER = "authorization"
HEALTH = "/grpc.health.v1.Health/"
"""The one service that is open: what looks at it has no token as a rule."""
REFUSAL = "a valid bearer token is required"

# grpc has no types.
Handler = Any


def is_allowed(token: str, metadata: Iterable[tuple[str, str | bytes]] | None) -> bool:
    """Whether a call's metadata bring ``token``, compared in constant time."""
    for key, value in metadata or ():
        if key == HEADER and isinstance(value, str):
            scheme, _, brought = value.partition(" ")
            return scheme.lower() == "bearer" and hmac.compare_digest(
                brought.strip().encode(), token.encode()
            )
    return False


def _refuse(request: object, context: Any) -> None:
    """A handler's behaviour for calls without the token; the context has no types."""
    context.abort(grpc.StatusCode.UNAUTHENTICATED, REFUSAL)


class TokenInterceptor(grpc.ServerInterceptor):
    """Refuses calls without the token, before their request is decoded.

    Args:
        token: that calls must bring.
    """

    def __init__(self, token: str) -> None:
        self._token = token
        self._refusal = grpc.unary_unary_rpc_method_handler(_refuse)

    def intercept_service(self, continuation: Callable[[Any], Handler], details: Any) -> Handler:
        """Let the call through, or give the handler that refuses it."""
        if details.method.startswith(HEALTH) or is_allowed(
            self._token, details.invocation_metadata
        ):
            return continuation(details)
        return self._refusal
