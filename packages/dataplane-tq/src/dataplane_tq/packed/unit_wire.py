"""What a storage unit and its clients say to each other, and socket calls with a deadline.

Both kinds of connection begin with the client's `hello` of fixed size, answered by one byte:
`ACCEPTED` or `REFUSED`. On the Unix socket the memory's descriptor comes with the answer, and the
connection then only shows that the unit lives. On TCP frames follow: a `FRAME` header, the ranges
as pairs of offset and size (`RANGES`), and for a write the bytes. A write is answered by
`ACCEPTED`, a read by the bytes. Whatever is wrong is answered by closing the connection.

Sockets block, with the kernel's own timeouts: one system call then moves a whole frame, without
coming back to Python for each chunk.
"""

from __future__ import annotations

import hashlib
import math
import select
import socket
import struct
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

_IOV_MAX = 1024  # the kernel takes no more buffers in one call (limits.h)
_SOCKET_BUFFER = 4 << 20
_TIMEVAL = struct.Struct("@ll")
_LINGER = struct.Struct("@ii")

ACCEPTED = b"+"
REFUSED = b"-"
WRITE = b"W"
READ = b"R"
FRAME = struct.Struct("<c3xIIQ")
"""Command, number of ranges, milliseconds that the client still waits, sum of the sizes."""
RANGES = "<u8"
"""numpy dtype of the ranges, two numbers each."""
MOST_RANGES = 65536
"""In one frame."""


class UnitAddress(msgspec.Struct, frozen=True):
    """Where a storage unit is reached.

    Attributes:
        unit: its name.
        unix: name of its Unix socket in the abstract namespace, without the leading zero byte.
        host: interface of its TCP socket.
        port: of its TCP socket.
        capacity: size of its memory in bytes.
        pid: its process, on its own node.
    """

    unit: str
    unix: str
    host: str
    port: int
    capacity: int
    pid: int


class Late(Exception):
    """The deadline of a socket call passed."""


def hello(token: bytes) -> bytes:
    """What a client says first: of one size, whatever the token's."""
    return b"packed01" + hashlib.sha256(token).digest()


HELLO_NBYTES = len(hello(b""))


def tune(sock: socket.socket) -> None:
    """Set up a TCP socket for bulk transfers and to notice a peer whose machine is gone."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)


def enlarge(sock: socket.socket) -> None:
    """Ask for large buffers, before the connection is made.

    Only where the kernel grants them: a request that it cuts down also turns off its own tuning.
    """
    for option, limit in ((socket.SO_SNDBUF, "wmem_max"), (socket.SO_RCVBUF, "rmem_max")):
        if int(Path("/proc/sys/net/core", limit).read_text()) >= _SOCKET_BUFFER:
            sock.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER)


def reset_on_close(sock: socket.socket) -> None:
    """Let the end of this side, however it comes, overtake what the peer has not read yet."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER.pack(1, 0))


def check_peer(sock: socket.socket) -> None:
    """Raise ConnectionResetError if the peer is gone, also before what it had sent is read."""
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)  # errors and hang-ups are always told
    if poll.poll(0):
        raise ConnectionResetError("the peer closed the connection")


def limit(sock: socket.socket, option: int, deadline: float) -> None:
    """Let the next calls wait until ``deadline`` (`time.monotonic`) and no longer.

    Args:
        option: ``SO_RCVTIMEO`` or ``SO_SNDTIMEO``; the latter also bounds ``connect``.

    Raises:
        Late: if the deadline has passed.
    """
    if deadline == math.inf:
        sock.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(0, 0))
        return
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise Late
    seconds = int(remaining)
    micros = max(1, int((remaining - seconds) * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(seconds, micros))


def send(sock: socket.socket, views: Sequence[memoryview], deadline: float) -> None:
    """Send all bytes of ``views``.

    Raises:
        Late: at the deadline.
        OSError: if the peer is gone.
    """
    left = [view for view in views if view.nbytes]
    while left:
        limit(sock, socket.SO_SNDTIMEO, deadline)
        try:
            sent = sock.sendmsg(left[:_IOV_MAX])
        except BlockingIOError:
            raise Late from None
        left = _after(left, sent)


def receive_into(
    sock: socket.socket, views: Sequence[memoryview], deadline: float, *, unread: bool = True
) -> None:
    """Fill all of ``views``.

    Args:
        unread: also with what a peer that is gone had sent before.

    Raises:
        Late: at the deadline.
        OSError: if the peer is gone or has closed the connection.
    """
    left = [view for view in views if view.nbytes]
    while left:
        if not unread:
            check_peer(sock)
        limit(sock, socket.SO_RCVTIMEO, deadline)
        try:
            received = sock.recvmsg_into(left[:_IOV_MAX], 0, socket.MSG_WAITALL)[0]
        except BlockingIOError:
            raise Late from None
        if received == 0:
            raise ConnectionResetError("the peer closed the connection")
        left = _after(left, received)


def receive(sock: socket.socket, nbytes: int, deadline: float) -> bytearray:
    """The next ``nbytes`` bytes; raises as `receive_into` does."""
    data = bytearray(nbytes)
    receive_into(sock, [memoryview(data)], deadline)
    return data


def _after(views: list[memoryview], done: int) -> list[memoryview]:
    """What is left of ``views`` after their first ``done`` bytes."""
    for at, view in enumerate(views):
        if done < view.nbytes:
            return [view[done:], *views[at + 1 :]]
        done -= view.nbytes
    return []
