"""Connections of the service: their number and their deadlines.

uvicorn limits neither the number of connections nor the time for a request to arrive. Here each
wait for a peer has a deadline: for its request, for its body, and until it reads an answer. Beyond
the maximum number of connections, the peer with the most of them loses the connection whose data
has been awaited longest. So silent peers do not block others.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Hashable
from typing import Any  # Any: what uvicorn gives its protocols

import structlog
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from dataplane_admin.ingest import BODY_S
from dataplane_admin.serving.grpc_refusal import PREFACE, GrpcRefusal
from dataplane_core.peer_log import PeerLog

REQUEST_S = 10.0
"""Deadline in seconds for the complete headers of the next request."""
READ_S = 30.0
"""Deadline in seconds for a peer to read an answer."""
# OTLP routes refuse a slow body after `BODY_S`; this deadline is for the other routes.
_BODY_S = BODY_S + 1.0

_TIMED_OUT = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\n"
    b"Content-Length: 0\r\n\r\n"
)


class Connections:
    """Open connections. For one event loop."""

    def __init__(self, max_connections: int) -> None:
        self.log = PeerLog(structlog.get_logger("dataplane_admin"))
        self._max = max_connections
        self._by_peer: Counter[str] = Counter()
        self._open = 0
        # Connections whose peer must send something, by peer, the longest awaited first.
        self._awaited: dict[str, dict[Connection, None]] = {}

    def add(self, connection: Connection) -> bool:
        """Add a connection, dropping another if necessary; return False if none can be dropped."""
        if self._open >= self._max:
            victim = self._oldest()
            if victim is None:
                return False
            victim.drop()
        self._open += 1
        self._by_peer[connection.peer] += 1
        return True

    def remove(self, connection: Connection) -> None:
        """Remove a connection."""
        self.stop_awaiting(connection)
        self._open -= 1
        self._by_peer[connection.peer] -= 1
        if not self._by_peer[connection.peer]:
            del self._by_peer[connection.peer]

    def start_awaiting(self, connection: Connection) -> None:
        """Record that the service awaits data from the peer from now on."""
        self.stop_awaiting(connection)
        self._awaited.setdefault(connection.peer, {})[connection] = None

    def stop_awaiting(self, connection: Connection) -> None:
        """Record that the service awaits nothing from the peer."""
        awaited = self._awaited.get(connection.peer, {})
        awaited.pop(connection, None)
        if not awaited:
            self._awaited.pop(connection.peer, None)

    def _oldest(self) -> Connection | None:
        if not self._awaited:
            return None
        peer = max(self._awaited, key=lambda peer: self._by_peer[peer])
        return next(iter(self._awaited[peer]))


class Config(uvicorn.Config):
    """uvicorn's configuration, with the collection of open connections."""

    connections: Connections


class Connection(H11Protocol):
    """uvicorn's protocol with deadlines for the peer."""

    config: Config

    def __init__(self, config: Config, **given: Any) -> None:
        super().__init__(config, **given)
        self.peer = "unknown"
        self._connections = config.connections
        self._is_counted = False
        self._is_first = True
        self._grpc: GrpcRefusal | None = None
        self._awaited: Hashable = None
        self._deadline: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Add the connection, or answer that there are too many."""
        super().connection_made(transport)
        self.peer = self.client[0] if self.client else self.peer
        if not self._connections.add(self):
            self._connections.log.warn(
                "connection_refused", self.peer, reason="too many connections"
            )
            transport.write(_FULL)
            transport.close()
            return
        self._is_counted = True
        self._update()

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection."""
        super().connection_lost(exc)
        self._forget()

    def data_received(self, data: bytes) -> None:
        """Receive data from the peer."""
        if not self._is_counted:
            return
        if self._is_first and data.startswith(PREFACE):
            self._connections.log.warn(
                "otlp_grpc_refused",
                self.peer,
                expected="OTLP over HTTP: OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf",
            )
            self._grpc = GrpcRefusal()
            self.transport.write(self._grpc.greeting)
        self._is_first = False
        if self._grpc is not None:
            # The client closes the connection, or the deadline for a request expires.
            self.transport.write(self._grpc.receive(data))
            return
        super().data_received(data)
        self._update()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        self._update()

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that is not HTTP."""
        self._connections.log.warn("invalid_request", self.peer)
        super().send_400_response(msg)

    def pause_writing(self) -> None:
        """Start the deadline for reading the answer."""
        super().pause_writing()
        self._unread = self.loop.call_later(READ_S, self._expire, "answer_not_read")

    def resume_writing(self) -> None:
        """End the deadline for reading the answer."""
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def drop(self) -> None:
        """Close the connection in favor of another one."""
        self._connections.log.warn("connection_dropped", self.peer, reason="too many connections")
        self._forget()
        self.transport.abort()

    def _update(self) -> None:
        """Start or end the peer's deadline."""
        if self.transport.is_closing() or not self._is_counted:
            return
        cycle = self.cycle
        awaited: Hashable = None
        if cycle is None or cycle.response_complete:
            awaited, seconds = ("request", cycle), REQUEST_S
        elif cycle.more_body:
            awaited, seconds = ("body", cycle), _BODY_S
        if awaited == self._awaited:
            return
        self._awaited = awaited
        self._end_deadline()
        if awaited is None:
            self._connections.stop_awaiting(self)
            return
        self._connections.start_awaiting(self)
        self._deadline = self.loop.call_later(seconds, self._expire, "request_timed_out")

    def _expire(self, event: str) -> None:
        if self.transport.is_closing():
            return
        self._connections.log.warn(event, self.peer)
        is_answered = self.cycle is not None and self.cycle.response_started
        if event == "request_timed_out" and (not is_answered or self.cycle.response_complete):
            self.transport.write(_TIMED_OUT)
            self.transport.close()
        else:
            self.transport.abort()

    def _end_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _forget(self) -> None:
        self._end_deadline()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
        if self._is_counted:
            self._is_counted = False
            self._connections.remove(self)
