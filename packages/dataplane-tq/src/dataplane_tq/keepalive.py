"""When the kernel ends a TCP connection whose other machine is gone without a word.

A process that is merely stopped keeps its connections: its kernel goes on answering. Only the bytes
that it does not read are refused after a while, and then the kernel of the sender cannot tell it
from a machine that is gone.
"""

from __future__ import annotations

import socket

CLIENT_TURN_S = 3
"""A client's machine counts as gone after 12 s, as a node of Ray does: see docs/operations.md."""
PART_TURN_S = 1
"""A storage unit's, or another actor's, after 4 s."""

_PROBES = 3
_SURELY_TAKEN = 32 << 10
"""Bytes that the kernel of a stopped process takes for it: sockets begin with twice as many."""


def end_when_silent(sock: socket.socket, turn_s: int) -> None:
    """Let the kernel end a connection whose other machine does not answer for four turns.

    Args:
        sock: of a TCP connection.
        turn_s: the kernel looks that often, in seconds.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, turn_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, turn_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    _end_unacknowledged(sock, turn_s)


def expect_acknowledgement(sock: socket.socket, nbytes: int, turn_s: int) -> None:
    """Let the same hold while a message of ``nbytes`` is on its way, unless it is too large.

    Without it the kernel would send the message again for a quarter of an hour before it gives up.
    A large one may wait for a process that is stopped, so there it is left at that.
    """
    _end_unacknowledged(sock, turn_s if nbytes <= _SURELY_TAKEN else 0)


def _end_unacknowledged(sock: socket.socket, turn_s: int) -> None:
    # Half a turn less than the probes take together: with this option their number is not read,
    # and the kernel compares when the next one is due.
    limit_ms = turn_s * (2 * _PROBES + 1) * 500
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit_ms)
