"""`ThreadedListener`: a TCP listener with a bounded number of connections, each with a thread."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

from refit_mx.deadline import Deadline
from refit_mx.hosts import is_every_interface
from refit_mx.listening import PeerLog, PendingPeers, bounded_connections

HANDSHAKE_S = 5.0
_IDLE_S = 1.0
"""After which a connection may be closed for another one: within a fetch a receiver asks sooner."""
_ACCEPT_PAUSE_S = 0.1
"""After a connection could not be accepted: without descriptors or threads the next cannot be."""


class Connection:
    """One that was accepted.

    Attributes:
        sock: its socket; closed by its own thread alone.
        peer: the host at its other end.
        idle_since: the monotonic time since which its next request is not there; None while one is
            served, and before the first.
        thread: that serves it.
    """

    def __init__(self, sock: socket.socket, peer: str, listener: ThreadedListener) -> None:
        self.sock = sock
        self.peer = peer
        self.idle_since: float | None = None
        self._listener = listener
        self.thread = threading.Thread(
            target=listener.run, args=(self,), name="refit-peer", daemon=True
        )

    def greeted(self) -> None:
        """Its first request is there."""
        self._listener.pending.remove(self)

    def warn(self, event: str) -> None:
        """Log what its peer did; see `PeerLog.warn`."""
        self._listener.log.warn(self.peer, event)

    def end(self) -> None:
        """Break it; its thread, which may be using it, closes it then."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)


class ThreadedListener:
    """Listens from its creation on.

    For a connection too many, the oldest that has not sent its first request is closed; else the
    one without a request for longest, if for a second; else the new one is refused. The same holds
    where no file descriptor is left.

    Args:
        name: of it, for the log.
        host: to bind.
        port: 0 takes a free one.
        serve: is given each connection in a thread of its own, calls `Connection.greeted` when
            its first request is there, and returns when it is to be closed.
        refusal: what is sent to a connection that is refused.
        max_connections: at a time.
        share: of the file descriptors of this process that they may take.
        handshake_timeout_s: for a peer to send its first request.

    Raises:
        OSError: the address cannot be listened on.
    """

    def __init__(
        self,
        name: str,
        host: str,
        port: int,
        *,
        serve: Callable[[Connection], None],
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
        """Those that are open."""
        self._closed = False
        self._stopped = threading.Event()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # All interfaces are those of IPv4 too, as they are for gRPC.
        both = ":" in host and is_every_interface(host) and socket.has_dualstack_ipv6()
        self._listener = socket.create_server(
            (host, port), family=family, backlog=128, dualstack_ipv6=both
        )
        self.port: int = self._listener.getsockname()[1]
        self.pending = PendingPeers[Connection](self._max, handshake_timeout_s, self.log)
        self._acceptor = threading.Thread(target=self._accept, name="refit-accept", daemon=True)
        self._acceptor.start()

    def close(self, timeout_s: float) -> None:
        """Stop listening, break all connections and wait for their threads.

        Args:
            timeout_s: for all threads together.
        """
        self._stopped.set()
        with self._lock:
            self._closed = True
            connections = list(self.connections)
        self.pending.close()
        # Wakes the thread in accept, which closing alone does not.
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
            except OSError:
                # A client that was gone before it was accepted, or no descriptor is left.
                with self._lock:
                    self._drop_silent()
                if self._stopped.wait(_ACCEPT_PAUSE_S):
                    return
                continue
            connection = Connection(sock, address[0], self)
            if not self._start(connection):
                connection.warn(f"was refused: {self._max} connections are open")
                with sock, contextlib.suppress(OSError):
                    sock.setblocking(False)
                    sock.send(self._refusal)

    def _start(self, connection: Connection) -> bool:
        """Serve a connection in its thread; returns whether there is room for it."""
        with self._lock:
            if self._closed:
                return False
            if len(self.connections) >= self._max and not self._drop_silent():
                return False
            self.connections.add(connection)
            self.pending.add(connection, connection.peer, connection.end)
            try:
                connection.thread.start()
            except RuntimeError:  # no thread is left
                self._forget(connection)
                return False
            return True

    def _drop_silent(self) -> bool:
        """Close one connection for another; returns whether there was one. Under the lock.

        A stranger is no loss, and a peer that is known connects again when it next asks.
        """
        silent = self.pending.drop_oldest()
        if silent is None:
            before = time.monotonic() - _IDLE_S
            idle = [
                (each.idle_since, each)
                for each in self.connections
                if each.idle_since is not None and each.idle_since < before
            ]
            if not idle:
                return False
            _, silent = min(idle, key=lambda pair: pair[0])
            silent.end()
        self.connections.discard(silent)
        return True

    def run(self, connection: Connection) -> None:
        """Serve a connection to its end; its thread calls this."""
        try:
            with connection.sock:
                self._serve(connection)
        finally:
            with self._lock:
                self._forget(connection)

    def _forget(self, connection: Connection) -> None:
        self.pending.remove(connection)
        self.connections.discard(connection)
