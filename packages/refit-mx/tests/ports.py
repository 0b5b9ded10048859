"""Ports that a process of a test listens on later."""

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def held_port(host: str = "127.0.0.1") -> Iterator[int]:
    """A port that the system gives to nobody else, and that a server can be given by its number.

    A socket that is bound and does not listen holds it: connections and port 0 pass it by, and a
    server that sets SO_REUSEADDR, as gRPC's and NIXL's do, gets it.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((host, 0))
        yield holder.getsockname()[1]
