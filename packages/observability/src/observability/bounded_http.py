"""An HTTP server that bounds the number of connections and the time to wait for a request.

The headers of a request must arrive within a deadline, so a silent client holds its connection and
thread only until then. At the maximum number of connections, a new connection replaces the one that
has been idle longest. A connection counts as idle until its request has arrived completely. Errors
are logged at most once per minute and client address.
"""

from __future__ import annotations

import errno
import io
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any  # Any: socketserver's own types of requests and addresses

import structlog

from dataplane_core.peer_log import PeerLog, fault

logger = structlog.get_logger("observability")

_MIN_IDLE_S = 1.0
"""Minimum time that a connection must have been idle before a new one may replace it."""

_ACCEPT_PAUSE_S = 0.1
_EXHAUSTED_ERRNOS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""Error numbers of `accept` when file descriptors or memory are exhausted."""


class BoundedServer(ThreadingHTTPServer):
    """A server with one thread per connection.

    A connection above the maximum replaces the one that has been idle longest. If none has been
    idle for a second, the new connection gets the status 503. A connection is idle from the end of
    one response until its next request has arrived completely, with headers and body.

    Args:
        host: address to bind.
        port: port to bind; 0 selects a free one.
        handler: class whose instances handle one connection each.
        max_connections: maximum number of concurrent connections.

    Raises:
        OSError: the address cannot be bound, for example because the port is in use.
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
        self._lock = threading.Lock()
        # Start of the idle time of each connection, monotonic; None while its request is answered.
        self._idle_since: dict[socket.socket, float | None] = {}
        # Connections that new ones replaced, until their threads end.
        self._replaced: set[socket.socket] = set()
        super().__init__((host, port), handler)

    def server_bind(self) -> None:
        """Bind without the DNS lookup of the host name that `http.server` makes."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def get_request(self) -> tuple[Any, Any]:
        """Accept a connection. If file descriptors or memory are exhausted, pause, then raise."""
        try:
            return super().get_request()
        except OSError as error:
            # `socketserver` ignores the error and calls this again at once.
            if error.errno in _EXHAUSTED_ERRNOS:
                self.log.warn("connection_not_accepted", "any", reason=error.strerror or "")
                time.sleep(_ACCEPT_PAUSE_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a separate thread, or refuse it if there are too many."""
        if not self._admit(request):
            self.log.warn("connection_refused", client_address[0], reason="too many connections")
            request.setblocking(False)  # the accept loop must not wait for this client
            with suppress(OSError):
                request.send(
                    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\n"
                    b"Content-Length: 0\r\nConnection: close\r\n\r\n"
                )
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # the thread cannot be started
            self._remove(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection until it closes."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._remove(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log an error of a handler without its text, which may quote the request."""
        error = sys.exception()
        if error is not None and not isinstance(error, OSError):  # OSError: connection lost
            self.log.warn("request_failed", client_address[0], error=fault(error))

    def mark_idle(self, connection: socket.socket) -> None:
        """Record that a connection is idle from now on: it waits for a request."""
        with self._lock:
            if connection in self._idle_since:
                self._idle_since[connection] = time.monotonic()

    def mark_busy(self, connection: socket.socket) -> None:
        """Record that a connection's request has arrived and is being answered."""
        with self._lock:
            if connection in self._idle_since:
                self._idle_since[connection] = None

    def shut_down_connections(self) -> None:
        """Shut down every open connection; their threads end."""
        with self._lock:
            for connection in (*self._idle_since, *self._replaced):
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def _admit(self, connection: socket.socket) -> bool:
        """Register a connection. At the maximum, replace the one that has been idle longest.

        Returns:
            False if the connection must be refused, because none has been idle long enough.
        """
        now = time.monotonic()
        with self._lock:
            if len(self._idle_since) >= self._max_connections:
                idle = [
                    (since, other) for other, since in self._idle_since.items() if since is not None
                ]
                since, oldest = min(idle, key=lambda item: item[0], default=(now, None))
                if oldest is None or now - since < _MIN_IDLE_S:
                    return False
                # The shutdown ends the connection's thread, which closes the socket.
                del self._idle_since[oldest]
                self._replaced.add(oldest)
                with suppress(OSError):
                    self.log.warn("connection_dropped", oldest.getpeername()[0])
                    oldest.shutdown(socket.SHUT_RDWR)
            self._idle_since[connection] = now
        return True

    def _remove(self, connection: socket.socket) -> None:
        with self._lock:
            self._idle_since.pop(connection, None)
            self._replaced.discard(connection)


class BoundedHandler(BaseHTTPRequestHandler):
    """Handler of a connection with one deadline for all headers of a request.

    Attributes:
        headers_s: maximum seconds from the moment the connection is idle until the headers of its
            next request are complete.
        deadline: monotonic time at which reads from the connection fail; a subclass may set it
            before it reads a body.
    """

    server: BoundedServer
    headers_s = 30.0
    deadline = 0.0

    def setup(self) -> None:
        """Replace the stream of requests by one whose reads fail at `deadline`.

        A socket timeout alone does not suffice: it begins anew with every byte that arrives.
        """
        super().setup()
        self.rfile.close()
        self.rfile = io.BufferedReader(DeadlineStream(self.connection, lambda: self.deadline))

    def handle_one_request(self) -> None:
        """Wait for a request and answer it."""
        self.server.mark_idle(self.connection)
        self.deadline = time.monotonic() + self.headers_s
        super().handle_one_request()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the base's name
        """Log nothing; the base class logs a line per request."""


class DeadlineStream(io.RawIOBase):
    """A stream of a connection whose reads fail after a deadline.

    Args:
        connection: the connection.
        deadline: function that returns the deadline, a time of `time.monotonic`.
    """

    def __init__(self, connection: socket.socket, deadline: Callable[[], float]) -> None:
        self._connection, self._deadline = connection, deadline
        # While this stream is open, the socket stays readable, even after `connection.close`.
        self._stream = connection.makefile("rb", buffering=0)

    def readable(self) -> bool:
        """Return True."""
        return True

    def close(self) -> None:
        """Close the stream, but not the connection."""
        self._stream.close()
        super().close()

    def readinto(self, buffer: Any) -> int | None:
        """Wait for bytes, and read those that have arrived.

        Raises:
            TimeoutError: no bytes arrived before the deadline.
        """
        remaining_s = self._deadline() - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError("the message did not arrive before its deadline")
        self._connection.settimeout(remaining_s)
        return self._stream.readinto(buffer)
