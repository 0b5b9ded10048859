"""The token of calls, as ModelExpress sends it: ``authorization: Bearer TOKEN``.

No error names a token: errors end up in logs.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import grpc

from refit_mx.errors import RefitConfigError
from refit_mx.grpc_listening import host_of
from refit_mx.listening import PeerLog

HEADER = "authorization"
HEALTH = "/grpc.health.v1.Health/"
"""The one service that is open: what looks at it has no token as a rule."""
REFUSAL = "a valid bearer token is required"
WITHOUT_TOKEN = "made a call without the token"  # noqa: S105  # for the log
LEAST_CHARACTERS = 16

# grpc has no types.
Handler = Any


def read_token(path: Path) -> str:
    """The token in a file, without the white space around it.

    Raises:
        RefitConfigError: the file cannot be read, or what it has is no token.
    """
    try:
        text = path.read_text(encoding="ascii")
    except OSError as error:
        raise RefitConfigError(f"token file {str(path)!r}: {error.strerror}") from None
    except UnicodeError:
        raise RefitConfigError(f"token file {str(path)!r}: it is not ASCII text") from None
    return checked_token(text, f"token file {str(path)!r}")


def checked_token(text: str, where: str) -> str:
    """The token in a text, without the white space around it.

    Args:
        text: to look at.
        where: it came from, for the error.

    Raises:
        RefitConfigError: it is no token.
    """
    token = text.strip()
    if len(token) < LEAST_CHARACTERS or not is_sendable(token):
        raise RefitConfigError(
            f"{where}: {len(token)} characters; expected one line of at least "
            f"{LEAST_CHARACTERS} visible ASCII characters"
        )
    return token


def is_sendable(token: str) -> bool:
    """Whether a header can carry it."""
    return token.isascii() and token.isprintable() and " " not in token


def is_allowed(token: str, metadata: Iterable[tuple[str, str | bytes]] | None) -> bool:
    """Whether a call's metadata bring ``token``, compared in constant time."""
    for key, value in metadata or ():
        if key == HEADER and isinstance(value, str):
            scheme, _, brought = value.partition(" ")
            return scheme.lower() == "bearer" and hmac.compare_digest(
                brought.strip().encode(), token.encode()
            )
    return False


class TokenInterceptor(grpc.ServerInterceptor):
    """Refuses calls without the token, before their request is decoded.

    Args:
        token: that calls must bring.
        log: that is told of peers that do not.
    """

    def __init__(self, token: str, log: PeerLog) -> None:
        self._token = token
        self._log = log
        self._refusal = grpc.unary_unary_rpc_method_handler(self._refuse)

    def intercept_service(self, continuation: Callable[[Any], Handler], details: Any) -> Handler:
        """Let the call through, or give the handler that refuses it."""
        if details.method.startswith(HEALTH) or is_allowed(
            self._token, details.invocation_metadata
        ):
            return continuation(details)
        return self._refusal

    def _refuse(self, request: object, context: Any) -> None:  # grpc has no types
        self._log.warn(host_of(context.peer()), WITHOUT_TOKEN)
        context.abort(grpc.StatusCode.UNAUTHENTICATED, REFUSAL)
