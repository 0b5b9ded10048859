"""An HTTP server that bounds the number of connections and the time to wait for a request.

A silent client occupies one connection and its thread. The headers of a request must arrive
within a deadline. At the maximum number of connections, the one that has been idle longest is
closed. Client errors are logged once per address and minute.
"""

from __future__ import annotations

import errno
import io
import socket
import socketserver
import sys
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any  # Any: socketserver's own types of requests and addresses

import structlog

from dataplane_core.peer_log import PeerLog, fault

logger = structlog.get_logger("observability")

_SILENT_S = 1.0
_ACCEPT_PAUSE_S = 0.1
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class BoundedServer(ThreadingHTTPServer):
    """A server with one thread per connection.

    A connection above the maximum replaces the one that has been idle longest, if that has been
    idle for a second. Otherwise it is answered with 503.

    Args:
        host: address to bind.
        port: port to bind; 0 takes a free one.
        handler: class that handles a connection.
        max_connections: maximum number of concurrent connections.

    Raises:
        OSError: the port is taken.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(
        self, host: str, port: int, handler: type[BoundedHandler], *, max_connections: int
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.log = PeerLog(logger)
        self._max_connections = max_connections
        self._changed = threading.Condition()
        # Monotonic time since which each connection has been idle; None while it sends an answer.
        self._open: dict[socket.socket, float | None] = {}
        self._dropped: set[socket.socket] = set()
        super().__init__((host, port), handler)

    def server_bind(self) -> None:
        """Bind without a DNS lookup of the host name, which `http.server` would make."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def get_request(self) -> tuple[Any, Any]:
        """Accept a connection; when file descriptors are exhausted, pause before the next try."""
        try:
            return super().get_request()
        except OSError as error:
            if error.errno in _EXHAUSTED:
                self.log.warn("connection_not_accepted", "any", reason=error.strerror or "")
                time.sleep(_ACCEPT_PAUSE_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a separate thread, unless there are too many."""
        if not self._admit(request):
            self.log.warn("connection_refused", client_address[0], reason="too many connections")
            request.setblocking(False)
            with suppress(OSError):
                request.send(
                    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\n"
                    b"Content-Length: 0\r\nConnection: close\r\n\r\n"
                )
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread can be started
            self._forget(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection until it closes."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._forget(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log a server error without its text, which may quote the request."""
        error = sys.exception()
        if error is not None and not isinstance(error, OSError):  # OSError: the client hung up
            self.log.warn("request_failed", client_address[0], error=fault(error))

    def mark_idle(self, connection: socket.socket) -> None:
        """Record that a connection is idle from now on, waiting for a request."""
        with self._changed:
            if connection in self._open:
                self._open[connection] = time.monotonic()

    def mark_busy(self, connection: socket.socket) -> None:
        """Record that a connection's request has arrived and is being answered."""
        with self._changed:
            if connection in self._open:
                self._open[connection] = None

    def hang_up(self) -> None:
        """Break every connection."""
        with self._changed:
            for connection in (*self._open, *self._dropped):
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def _admit(self, connection: socket.socket) -> bool:
        """Register a connection; at the maximum, drop the longest idle one or return False."""
        now = time.monotonic()
        with self._changed:
            if len(self._open) >= self._max_connections:
                idle = [(since, peer) for peer, since in self._open.items() if since is not None]
                since, oldest = min(idle, key=lambda item: item[0], default=(now, None))
                if oldest is None or now - since < _SILENT_S:
                    return False
                # The shutdown ends the connection's thread, which closes the socket.
                del self._open[oldest]
                self._dropped.add(oldest)
                with suppress(OSError):
                    self.log.warn("connection_dropped", oldest.getpeername()[0])
                    oldest.shutdown(socket.SHUT_RDWR)
            self._open[connection] = now
        return True

    def _forget(self, connection: socket.socket) -> None:
        with self._changed:
            self._open.pop(connection, None)
            self._dropped.discard(connection)


class BoundedHandler(BaseHTTPRequestHandler):
    """Handler of a connection with one deadline for all headers of a request.

    Attributes:
        headers_s: maximum time in seconds from the start of the wait for a request until its
            headers are complete.
        deadline: monotonic time by which the data being read must arrive.
    """

    server: BoundedServer
    headers_s = 30.0
    deadline = 0.0

    def setup(self) -> None:
        """Set up reads that end at `deadline`, however slowly the bytes arrive."""
        super().setup()
        self.rfile.close()
        self.rfile = io.BufferedReader(_Timed(self))

    def handle_one_request(self) -> None:
        """Wait for a request and answer it."""
        self.server.mark_idle(self.connection)
        self.deadline = time.monotonic() + self.headers_s
        super().handle_one_request()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the base's name
        """Log nothing: one line per request is noise."""


class _Timed(io.RawIOBase):
    """A stream that reads from a handler's connection until the handler's deadline."""

    def __init__(self, handler: BoundedHandler) -> None:
        self._handler = handler

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read the available bytes.

        Raises:
            TimeoutError: no bytes arrived before the deadline.
        """
        remaining_s = self._handler.deadline - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError("the request did not arrive before its deadline")
        self._handler.connection.settimeout(remaining_s)
        return self._handler.connection.recv_into(buffer)
