"""Storage unit: the server of one `Arena`, for local and remote clients.

Clients on the same node receive the memory's descriptor, then read and write without the unit.
Remote clients send `unit_wire` frames over TCP; their bytes move between socket and mapping without
an extra copy.

Each connection has a separate thread, so a slow or stopped peer does not block other clients.
"""

from __future__ import annotations

import hmac
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import ray
import structlog

from dataplane_core.peer_log import PeerLog
from dataplane_tq.packed import unit_wire as wire
from dataplane_tq.packed.arena import Arena
from dataplane_tq.packed.unit_wire import UnitAddress
from dataplane_tq.sockets import max_connections

_HANDSHAKE_S = 5.0
_BACKLOG = 128
_MAX_CONNECTIONS = 1024
_MAX_PENDING = 128
"""Maximum number of connections that have not sent the token yet; each has a thread."""
_MAX_BUDGET_S = 600.0


class UnitServer:
    """Server of an arena, from construction until `close`.

    Args:
        arena: the memory; the caller closes it after the server.
        token: secret that clients must send.
        host: interface to listen on for remote clients.

    Attributes:
        address: address for `UnitClient`.
    """

    def __init__(self, arena: Arena, token: bytes, host: str) -> None:
        self._arena = arena
        self._hello = wire.hello(token)
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._pending: dict[socket.socket, None] = {}
        """Connections that have not sent the token yet, oldest first."""
        self._max_connections = min(_MAX_CONNECTIONS, max_connections())
        self._log = PeerLog(structlog.get_logger("dataplane_tq.unit"))
        name = f"dataplane-tq-{secrets.token_hex(16)}"
        self._unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._unix.bind("\0" + name)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._tcp = socket.socket(family, socket.SOCK_STREAM)
        wire.enlarge(self._tcp)  # accepted connections inherit it
        self._tcp.bind((host, 0))
        self.address = UnitAddress(
            arena.name, name, host, self._tcp.getsockname()[1], arena.nbytes, os.getpid()
        )
        self._acceptors = [
            threading.Thread(target=self._accept, args=listener, name="unit-accept", daemon=True)
            for listener in ((self._unix, self._serve_local), (self._tcp, self._serve_remote))
        ]
        self._unix.listen(_BACKLOG)
        self._tcp.listen(_BACKLOG)
        for thread in self._acceptors:
            thread.start()

    def _accept(self, listener: socket.socket, serve: Callable[[socket.socket], None]) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                # Unless `close` was called, descriptors or memory ran out: retry later.
                if self._closed.wait(0.05):
                    return
                continue
            with self._lock:
                if self._closed.is_set() or not self._admit():
                    sock.close()
                    continue
                self._pending[sock] = None
                thread = threading.Thread(
                    target=self._serve_connection,
                    args=(sock, serve),
                    name="unit-connection",
                    daemon=True,
                )
                self._connections[sock] = thread
                try:
                    thread.start()
                except RuntimeError:  # no thread can be started now
                    del self._connections[sock], self._pending[sock]
                    sock.close()

    def _admit(self) -> bool:
        """Admit a connection; at the limit, close the oldest one that has not sent the token."""
        full = len(self._connections) >= self._max_connections
        if full or len(self._pending) >= _MAX_PENDING:
            if not self._pending:
                return False
            oldest = next(iter(self._pending))
            del self._pending[oldest]
            _shut(oldest)  # this also ends its thread
        return True

    def _serve_connection(
        self, sock: socket.socket, serve: Callable[[socket.socket], None]
    ) -> None:
        try:
            deadline = time.monotonic() + _HANDSHAKE_S
            hello = wire.receive(sock, wire.HELLO_NBYTES, deadline)
            with self._lock:
                self._pending.pop(sock, None)
            if hmac.compare_digest(hello, self._hello):
                serve(sock)
            else:
                self._log.warn("connection_refused", _peer(sock), error="wrong token")
                wire.send(sock, [memoryview(wire.REFUSED)], deadline)
        except (OSError, wire.DeadlinePassed):
            pass  # the peer is gone, or too slow
        finally:
            with self._lock:
                del self._connections[sock]
                self._pending.pop(sock, None)
            sock.close()

    def _serve_local(self, sock: socket.socket) -> None:
        wire.limit(sock, socket.SO_SNDTIMEO, time.monotonic() + _HANDSHAKE_S)
        socket.send_fds(sock, [wire.ACCEPTED], [self._arena.fd])
        # The client sends nothing more; this returns when it closes the connection.
        wire.receive(sock, 1, math.inf)

    def _serve_remote(self, sock: socket.socket) -> None:
        wire.tune(sock)
        wire.send(sock, [memoryview(wire.ACCEPTED)], time.monotonic() + _HANDSHAKE_S)
        while self._serve_frame(sock):
            pass
        self._log.warn("connection_closed", _peer(sock), error="malformed frame")

    def _serve_frame(self, sock: socket.socket) -> bool:
        """Serve the next frame; return False if it is malformed."""
        header = wire.receive(sock, wire.FRAME.size, math.inf)
        command, count, budget_ms, nbytes = wire.FRAME.unpack(header)
        if command not in (wire.WRITE, wire.READ) or not 0 < count <= wire.MAX_RANGES:
            return False
        # After the deadline the ranges may belong to another put, so nothing is written then.
        deadline = time.monotonic() + min(budget_ms / 1000, _MAX_BUDGET_S)
        ranges = np.frombuffer(wire.receive(sock, 16 * count, deadline), wire.RANGES)
        offsets, sizes = ranges[::2], ranges[1::2]
        capacity = self._arena.nbytes
        # offset + size could wrap around; capacity - size cannot.
        if (sizes > capacity).any() or (offsets > capacity - sizes).any():
            return False
        pairs = list(zip(offsets.tolist(), sizes.tolist(), strict=True))
        if sum(size for _, size in pairs) != nbytes:
            return False
        memory = self._arena.buffer.data
        views = [memory[offset : offset + size] for offset, size in pairs]
        if command == wire.WRITE:
            # If this process was stopped, the client may be long gone, and its ranges may belong to
            # another put. So the bytes of a client that disconnected are not written.
            wire.receive_into(sock, views, deadline, unread=False)
            wire.send(sock, [memoryview(wire.ACCEPTED)], deadline)
        else:
            wire.send(sock, views, deadline)
        return True

    def close(self) -> None:
        """Stop listening, close all connections and wait for their threads."""
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
            connections = dict(self._connections)
            for sock in connections:
                _shut(sock)
        for listener in (self._unix, self._tcp):
            _shut(listener)  # wakes accept(), which close() alone does not
        for thread in (*self._acceptors, *connections.values()):
            thread.join()
        self._unix.close()
        self._tcp.close()

    def __enter__(self) -> UnitServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _peer(sock: socket.socket) -> str:
    """Return the peer's address; all processes on the Unix socket are one peer."""
    if sock.family == socket.AF_UNIX:
        return "local"
    with suppress(OSError):
        return str(sock.getpeername()[0])
    return "unknown"


def _shut(sock: socket.socket) -> None:
    with suppress(OSError):  # the peer has closed it already
        sock.shutdown(socket.SHUT_RDWR)


class UnitActor:
    """Ray actor that owns a unit's memory for its lifetime; its process imports no torch.

    Args:
        name: name of the unit.
        nbytes: size of its memory; pages are allocated on the first write.
        token: secret that clients must send.
    """

    def __init__(self, name: str, nbytes: int, token: bytes) -> None:
        self._arena = Arena.create(name, nbytes)
        self._server = UnitServer(self._arena, token, ray.util.get_node_ip_address())

    def describe(self) -> tuple[UnitAddress, str]:
        """Return the unit's address, and the id of its node."""
        return self._server.address, ray.get_runtime_context().get_node_id()
