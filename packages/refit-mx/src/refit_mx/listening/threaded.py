"""`ThreadedListener`: a TCP listener with a bounded number of connections, one thread each."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
from collections.abc import Callable

from refit_mx.deadline import Deadline
from refit_mx.listening.hosts import is_wildcard_host
from refit_mx.listening.peers import PeerLog, PendingPeers, bounded_connections

HANDSHAKE_S = 5.0
_IDLE_S = 1.0
"""Idle time after which a connection may be closed for another; gaps within a fetch are shorter."""
_ACCEPT_PAUSE_S = 0.1
"""Pause after accept has failed: without a free descriptor the next call would fail too."""
_NO_CAPACITY = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
"""Errors of accept for which closing another connection helps."""


class Connection:
    """An accepted connection. Only its own thread closes the socket.

    ``idle_since`` is the monotonic time at which it began to wait for its next request; None while
    one is served, and before the first request.
    """

    def __init__(self, sock: socket.socket, peer: str, listener: ThreadedListener) -> None:
        self.sock = sock
        self.peer = peer
        self.idle_since: float | None = None
        self._listener = listener
        self.thread = threading.Thread(
            target=listener.run, args=(self,), name="refit-peer", daemon=True
        )

    def mark_greeted(self) -> None:
        """Record that the first request has arrived."""
        self._listener.pending.remove(self)

    def warn(self, event: str) -> None:
        """Log an event of the peer; see `PeerLog.warn`."""
        self._listener.log.warn(self.peer, event)

    def end(self) -> None:
        """Shut the socket down; its thread, which may be using it, then closes it."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)


class ThreadedListener:
    """A TCP listener that starts when it is created; port 0 picks a free one.

    If there are too many connections, or no file descriptor is free, an open connection is closed:
    the oldest without a first request, else the connection idle for longest (at least a second).
    If there is neither, the new connection is refused, and gets the bytes ``refusal``.

    The function ``serve`` serves a connection in its thread. It calls `Connection.mark_greeted`
    when the first request has arrived, within ``handshake_timeout_s``, and returns to close the
    connection. For ``share`` see `refit_mx.listening.peers.bounded_connections`.

    Raises:
        OSError: the listener cannot bind the address.
    """

    def __init__(
        self,
        name: str,
        host: str,
        port: int,
        *,
        serve: Callable[[Connection], object],
        refusal: bytes,
        max_connections: int,
        share: float,
        handshake_timeout_s: float,
    ) -> None:
        self._serve = serve
        self._refusal = refusal
        self._max = bounded_connections(max_connections, share)
        self.log = PeerLog(name)
        self._lock = threading.Lock()
        self.connections: set[Connection] = set()
        """Open connections."""
        self._closed = False
        self._stopped = threading.Event()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # As in gRPC, a listener on all IPv6 interfaces also accepts IPv4.
        both = ":" in host and is_wildcard_host(host) and socket.has_dualstack_ipv6()
        self._listener = socket.create_server(
            (host, port), family=family, backlog=128, dualstack_ipv6=both
        )
        self.port: int = self._listener.getsockname()[1]
        self.pending = PendingPeers[Connection](self._max, handshake_timeout_s, self.log)
        self._acceptor = threading.Thread(target=self._accept, name="refit-accept", daemon=True)
        self._acceptor.start()

    def close(self, timeout_s: float) -> None:
        """Stop listening, end all connections and wait up to ``timeout_s`` for their threads."""
        self._stopped.set()
        with self._lock:
            self._closed = True
            connections = list(self.connections)
        self.pending.close()
        # Wakes the thread in accept, which close alone does not.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in connections:
            connection.end()
        deadline = Deadline(timeout_s, "closing a listener")
        for thread in (self._acceptor, *(each.thread for each in connections)):
            if thread is not threading.current_thread():
                thread.join(deadline.left_s)

    def _accept(self) -> None:
        while True:
            try:
                sock, address = self._listener.accept()
            except OSError as error:
                # Any other error means that the client disconnected before it was accepted.
                if error.errno in _NO_CAPACITY:
                    with self._lock:
                        self._evict()
                if self._stopped.wait(_ACCEPT_PAUSE_S):
                    return
                continue
            connection = Connection(sock, address[0], self)
            reason = self._start(connection)
            if reason is not None:
                connection.warn(f"was refused: {reason}")
                with sock, contextlib.suppress(OSError):
                    sock.setblocking(False)
                    sock.send(self._refusal)

    def _start(self, connection: Connection) -> str | None:
        """Serve a connection in its thread; return why it was refused, or None if it was not."""
        with self._lock:
            if self._closed:
                return "the listener is closed"
            if len(self.connections) >= self._max and not self._evict():
                return f"{self._max} connections are open"
            self.connections.add(connection)
            self.pending.add(connection, connection.peer, connection.end)
            try:
                connection.thread.start()
            except RuntimeError:
                self._forget(connection)
                return "no thread can be started"
            return None

    def _evict(self) -> bool:
        """Close a connection in favor of another; return whether one was closed. Needs the lock.

        A peer without a first request loses nothing, and an idle peer reconnects for its next one.
        """
        evicted = self.pending.drop_oldest()
        if evicted is None:
            before = time.monotonic() - _IDLE_S
            idle = [
                (each.idle_since, each)
                for each in self.connections
                if each.idle_since is not None and each.idle_since < before
            ]
            if not idle:
                return False
            _, evicted = min(idle, key=lambda pair: pair[0])
            evicted.end()
        self.connections.discard(evicted)
        return True

    def run(self, connection: Connection) -> None:
        """Serve a connection until it ends; called in its thread."""
        try:
            with connection.sock:
                self._serve(connection)
        finally:
            with self._lock:
                self._forget(connection)

    def _forget(self, connection: Connection) -> None:
        self.pending.remove(connection)
        self.connections.discard(connection)
