"""Limits of TCP connections: their number, and the silence after which the kernel closes one.

A process stopped by SIGSTOP keeps its connections, because its kernel continues to answer. But that
kernel accepts no more bytes once its receive buffer is full; to the sender the machine then seems
gone.
"""

from __future__ import annotations

import resource
import socket

CLIENT_PROBE_S = 3
"""Probe interval of a client's connection: its machine counts as gone after 12 s."""
PART_PROBE_S = 1
"""Probe interval of a storage unit's or another actor's connection: gone after 4 s."""

_PROBES = 3
_BUFFERED_BYTES = 32 << 10
"""Bytes that the kernel of a stopped process still buffers: half of a new socket's buffer."""

_MAX_CONNECTIONS = 4096
_SPARE_DESCRIPTORS = 128
"""File descriptors reserved for the process's own files and for Ray's."""


def max_connections() -> int:
    """Return the maximum number of connections of a server in this process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        _MAX_CONNECTIONS if soft < 0 else max(16, min(_MAX_CONNECTIONS, soft - _SPARE_DESCRIPTORS))
    )


def close_when_silent(sock: socket.socket, probe_s: int) -> None:
    """Have the kernel close a connection whose peer's machine is silent for four intervals.

    Args:
        sock: socket of a TCP connection.
        probe_s: interval of the kernel's keep-alive probes, in seconds.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, probe_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, probe_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    _set_limit(sock, probe_s)


def limit_unacknowledged(sock: socket.socket, nbytes: int, probe_s: int) -> None:
    """Have the kernel close the connection if a message of ``nbytes`` is not acknowledged.

    The time limit is that of `close_when_silent`; without it the kernel would resend the message
    for a quarter of an hour. A message larger than the peer's buffer has no time limit, because it
    may wait for a stopped process.
    """
    _set_limit(sock, probe_s if nbytes <= _BUFFERED_BYTES else 0)


def _set_limit(sock: socket.socket, probe_s: int) -> None:
    # With this option the kernel ignores the number of probes, and checks the limit only when a
    # probe is due. So the limit is half an interval less than idle time plus all probes.
    limit_ms = probe_s * (2 * _PROBES + 1) * 500
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit_ms)
