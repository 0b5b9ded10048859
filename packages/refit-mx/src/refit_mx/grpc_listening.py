"""The bounds of `refit_mx.listening` for gRPC servers.

gRPC itself drops connections that are silent or slow in their handshake and bounds their number. A
call whose request never comes is not silent to it, and holds a thread of a synchronous server.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

import grpc

from refit_mx.listening import PeerLog, PendingPeers, bounded_connections

REQUEST_S = 5.0
"""From the first byte of a call to the last one of its request."""
_HANDSHAKE_MS = 2000
"""Of TLS and HTTP/2. A full server refuses new peers, so silent ones must not stay for long."""
_IDLE_MS = 15_000
"""A connection without calls is closed, and opened again by the next call."""
_KEEPALIVE_MS = 30_000
_MAX_CONNECTIONS = 16_384
_MAX_CALLS = 100
MALFORMED = "the request is not a message of this method"

# grpc has no types.
Handler = Any
Context = Any


def server_options(share: float) -> tuple[tuple[str, int], ...]:
    """Return the options of a server.

    Args:
        share: of the file descriptors of this process that its connections may take.
    """
    return (
        # A second server on the same port must fail, not share its calls.
        ("grpc.so_reuseport", 0),
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
        ("grpc.max_allowed_incoming_connections", bounded_connections(_MAX_CONNECTIONS, share)),
        ("grpc.max_connection_idle_ms", _IDLE_MS),
        # Finds peers that are gone without a word.
        ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
        ("grpc.max_concurrent_streams", _MAX_CALLS),
        ("grpc.max_metadata_size", 16 << 10),
    )


def host_of(peer: str) -> str:
    """Return the host of a peer, which gRPC names ``ipv4:127.0.0.1:40``, ``ipv6:%5B::1%5D:40``."""
    return unquote(peer.partition(":")[2].rpartition(":")[0]).strip("[]") or peer


class RequestGuard(grpc.ServerInterceptor):
    """Bounds the calls of a synchronous server whose request is not there, and decodes it itself.

    gRPC would wait for a request for ever, in a thread of the pool, and log a traceback for one
    that is malformed. Has to be the first interceptor.

    Args:
        name: of the server, for the log.
        threads: of its pool; half of them may wait for requests.
    """

    def __init__(self, name: str, threads: int) -> None:
        self.log = PeerLog(name)
        """Of the server's peers."""
        self._pending = PendingPeers[object](max(1, threads // 2), REQUEST_S, self.log)

    def intercept_service(self, continuation: Callable[[Any], Handler], details: Any) -> Handler:
        """Give a handler that waits for its request a bounded time."""
        handler = continuation(details)
        if handler is None or handler.unary_unary is None:
            return handler

        def serve(requests: Any, context: Context) -> Any:
            peer = host_of(context.peer())
            with self._pending.owing(context, peer, context.cancel):
                data = next(requests, None)
            request = decoded(handler, data)
            if request is None:
                self.log.warn(peer, "sent a malformed request")
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, MALFORMED)
            return handler.unary_unary(request, context)

        # A stream of one request looks the same to clients.
        return grpc.stream_unary_rpc_method_handler(
            serve, request_deserializer=None, response_serializer=handler.response_serializer
        )

    def close(self) -> None:
        """Stop counting time. May be called again."""
        self._pending.close()


def decoded(handler: Handler, data: bytes | None) -> Any:
    """Return the request of a handler's method; None for one that is none."""
    if data is None or handler.request_deserializer is None:
        return data
    try:
        return handler.request_deserializer(data)
    except Exception:  # noqa: BLE001 - protobuf's own error, which has no stable place
        return None
