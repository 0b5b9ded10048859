"""Reserve a port on which a process listens later, or again after a restart."""

from __future__ import annotations

import socket


def hold_port() -> socket.socket:
    """Return a socket that reserves the port to which it is bound on 127.0.0.1.

    It does not listen, so it gets no connection, and the system gives its port to no other socket.
    A server that sets SO_REUSEADDR can listen on it.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    return holder


def address_of(holder: socket.socket) -> str:
    """Return the ``host:port`` of a reserved port."""
    host, port = holder.getsockname()
    return f"{host}:{port}"
