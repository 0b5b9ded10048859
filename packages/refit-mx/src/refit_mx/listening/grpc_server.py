"""Limits for gRPC servers, enforced with `refit_mx.listening.peers`.

gRPC drops connections that are silent or slow during their handshake, and limits their number. It
does not limit a call whose request never arrives, which holds a thread of a synchronous server.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

import grpc

from refit_mx.listening.peers import PeerLog, PendingPeers, bounded_connections

REQUEST_S = 5.0
"""Time limit from the first byte of a call to the last byte of its request."""
_HANDSHAKE_MS = 2000
"""Time limit of TLS and HTTP/2. A full server refuses new peers, so silent ones must go soon."""
_IDLE_MS = 15_000
"""Time after which a connection without calls is closed; the next call opens it again."""
_KEEPALIVE_MS = 30_000
_MAX_CONNECTIONS = 16_384
_MAX_CALLS = 100
MALFORMED = "the request is not a message of this method"

# grpc has no types.
Handler = Any
Context = Any


def server_options(share: float) -> tuple[tuple[str, int], ...]:
    """Return the options of a gRPC server."""
    return (
        # A second server on the same port must fail, not receive some of the calls.
        ("grpc.so_reuseport", 0),
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
        ("grpc.max_allowed_incoming_connections", bounded_connections(_MAX_CONNECTIONS, share)),
        ("grpc.max_connection_idle_ms", _IDLE_MS),
        # Detects peers that disappeared without closing the connection.
        ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
        ("grpc.max_concurrent_streams", _MAX_CALLS),
        ("grpc.max_metadata_size", 16 << 10),
    )


def host_of(peer: str) -> str:
    """Return the host of a gRPC peer name: ``ipv4:127.0.0.1:40`` or ``ipv6:%5B::1%5D:40``."""
    return unquote(peer.partition(":")[2].rpartition(":")[0]).strip("[]") or peer


class RequestGuard(grpc.ServerInterceptor):
    """Interceptor that limits the wait for requests in a synchronous server.

    gRPC would wait for a request without limit, in a thread of the pool, and log a traceback for a
    malformed one. So this interceptor, which must be the first, gets the request and decodes it.
    Half of the ``threads`` of the pool may wait for requests.
    """

    def __init__(self, name: str, threads: int) -> None:
        self.log = PeerLog(name)
        """Log of the server's peers."""
        self._pending = PendingPeers[object](max(1, threads // 2), REQUEST_S, self.log)

    def intercept_service(self, continuation: Callable[[Any], Handler], details: Any) -> Handler:
        """Return a handler that waits for its request for a bounded time."""
        handler = continuation(details)
        if handler is None or handler.unary_unary is None:
            return handler

        def serve(requests: Any, context: Context) -> Any:
            peer = host_of(context.peer())
            self._pending.add(context, peer, context.cancel)
            try:
                data = next(requests, None)
            finally:
                self._pending.remove(context)
            request = decoded(handler, data)
            if request is None:
                self.log.warn(peer, "sent a malformed request")
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, MALFORMED)
            return handler.unary_unary(request, context)

        # For clients, a stream of one request is the same as a single request.
        return grpc.stream_unary_rpc_method_handler(
            serve, request_deserializer=None, response_serializer=handler.response_serializer
        )

    def close(self) -> None:
        """Stop the timer. May be called again."""
        self._pending.close()


def decoded(handler: Handler, data: bytes | None) -> Any:
    """Return the decoded request of a method; None if it is malformed."""
    if data is None or handler.request_deserializer is None:
        return data
    try:
        return handler.request_deserializer(data)
    except Exception:  # noqa: BLE001 - protobuf's error class has no stable import path
        return None
