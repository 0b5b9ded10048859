"""The token of calls, as ModelExpress sends it: ``authorization: Bearer TOKEN``.

No error contains a token: errors are logged.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import grpc

from refit_mx.errors import RefitConfigError
from refit_mx.listening.grpc_server import host_of
from refit_mx.listening.peers import PeerLog

HEADER = "authorization"
HEALTH = "/grpc.health.v1.Health/"
"""The only service open to all: health probes usually have no token."""
REFUSAL = "a valid bearer token is required"
WITHOUT_TOKEN = "made a call without the token"  # noqa: S105  # for the log
MIN_CHARACTERS = 16

# grpc has no types.
Handler = Any


def read_token(path: Path) -> str:
    """Return the token in a file, without surrounding white space.

    Raises:
        RefitConfigError: the file cannot be read, or its content is not a token.
    """
    try:
        text = path.read_text(encoding="ascii")
    except OSError as error:
        raise RefitConfigError(f"token file {str(path)!r}: {error.strerror}") from None
    except UnicodeError:
        raise RefitConfigError(f"token file {str(path)!r}: it is not ASCII text") from None
    return checked_token(text, f"token file {str(path)!r}")


def checked_token(text: str, source: str) -> str:
    """Return the token in a text, without surrounding white space; raise if it is not a token."""
    token = text.strip()
    if len(token) < MIN_CHARACTERS or not is_sendable(token):
        raise RefitConfigError(
            f"{source}: {len(token)} characters; expected one line of at least "
            f"{MIN_CHARACTERS} visible ASCII characters"
        )
    return token


def is_sendable(token: str) -> bool:
    """Return whether a header can carry the token."""
    return token.isascii() and token.isprintable() and " " not in token


def is_allowed(token: str, metadata: Iterable[tuple[str, str | bytes]] | None) -> bool:
    """Return whether a call's metadata has ``token``, compared in constant time."""
    for key, value in metadata or ():
        if key == HEADER and isinstance(value, str):
            scheme, _, sent = value.partition(" ")
            return scheme.lower() == "bearer" and hmac.compare_digest(
                sent.strip().encode(), token.encode()
            )
    return False


class TokenInterceptor(grpc.ServerInterceptor):
    """Interceptor that refuses calls without the token before their request is decoded."""

    def __init__(self, token: str, log: PeerLog) -> None:
        self._token = token
        self._log = log
        self._refusal = grpc.unary_unary_rpc_method_handler(self._refuse)

    def intercept_service(self, continuation: Callable[[Any], Handler], details: Any) -> Handler:
        """Return the call's handler, or one that refuses the call."""
        if details.method.startswith(HEALTH) or is_allowed(
            self._token, details.invocation_metadata
        ):
            return continuation(details)
        return self._refusal

    def _refuse(self, request: object, context: Any) -> None:  # grpc has no types
        self._log.warn(host_of(context.peer()), WITHOUT_TOKEN)
        context.abort(grpc.StatusCode.UNAUTHENTICATED, REFUSAL)
