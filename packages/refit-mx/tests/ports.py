"""Reserve a port that a test's process listens on later."""

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def held_port(host: str = "127.0.0.1") -> Iterator[int]:
    """Reserve a port that the system assigns to no other socket.

    A bound socket that does not listen holds it: it gets no connections, and port 0 never picks it.
    A server that sets SO_REUSEADDR, like gRPC's and NIXL's, can still bind it.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((host, 0))
        yield holder.getsockname()[1]
