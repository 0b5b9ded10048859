"""Protocol between a storage unit and its clients, and socket calls with a deadline.

Every connection begins with the client's `hello` of fixed size. The answer is one byte: `ACCEPTED`
or `REFUSED`. On the Unix socket the memory's descriptor comes with the answer; afterwards the
connection only shows that the unit is alive. On TCP, frames follow: a `FRAME` header, the ranges as
pairs of offset and size (`RANGES`), and for a write the bytes. The answer to a write is `ACCEPTED`,
to a read the bytes. A malformed frame makes the unit close the connection.

::

    hello   |packed01|sha256 of the token: 32 bytes|
    frame   |W or R|3 pad|ranges: u32|budget, ms: u32|bytes: u64|(offset: u64, size: u64) * ranges|
    write   frame, then the concatenated bytes of all ranges            ->  |+|
    read    frame                                                       ->  those bytes

Sockets block, with the kernel's time-outs: one system call then moves an entire frame, without a
return to Python for each chunk.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import select
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from dataplane_tq.sockets import PART_PROBE_S, close_when_silent

_IOV_MAX = 1024  # maximum number of buffers in one system call (limits.h)
_CONNECT_S = 5.0
_SOCKET_BUFFER = 4 << 20
_TIMEVAL = struct.Struct("@ll")
_LINGER = struct.Struct("@ii")

ACCEPTED = b"+"
REFUSED = b"-"
WRITE = b"W"
READ = b"R"
FRAME = struct.Struct("<c3xIIQ")
"""Command, number of ranges, time until the client's deadline in ms, total size of the ranges."""
RANGES = "<u8"
"""Numpy dtype of the ranges; each range is two numbers."""
MAX_RANGES = 65536
"""Maximum number of ranges in one frame."""


class UnitAddress(msgspec.Struct, frozen=True):
    """Address of a storage unit.

    Attributes:
        unit: name of the unit.
        unix: name of its Unix socket in the abstract namespace, without the leading zero byte.
        host: interface of its TCP socket.
        port: port of its TCP socket.
        capacity: size of its memory in bytes.
        pid: process id on the unit's node.
    """

    unit: str
    unix: str
    host: str
    port: int
    capacity: int
    pid: int


class UnitSpec(msgspec.Struct, frozen=True):
    """Specification of a storage unit: its name, its node, and the size of its memory in bytes.

    The size is rounded down to a multiple of 64.
    """

    name: str
    node: str
    capacity: int


class DeadlinePassed(Exception):
    """Exception of a socket call whose deadline passed."""


def hello(token: bytes) -> bytes:
    """Return a client's first message; its size does not depend on the token's."""
    return b"packed01" + hashlib.sha256(token).digest()


HELLO_NBYTES = len(hello(b""))


@contextmanager
def closed_on_error(sock: socket.socket) -> Iterator[None]:
    """Close the socket if the block fails."""
    try:
        yield
    except BaseException:  # also an interrupt must not leave the socket open
        sock.close()
        raise


def tune(sock: socket.socket) -> None:
    """Set up a TCP socket for bulk transfers and to detect a peer whose machine is gone."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)


def enlarge(sock: socket.socket) -> None:
    """Request large socket buffers if the kernel's limits permit; call it before connecting.

    The kernel would reduce a request above its limit, and would stop tuning the buffer's size.
    """
    for option, limit in ((socket.SO_SNDBUF, "wmem_max"), (socket.SO_RCVBUF, "rmem_max")):
        if int(Path("/proc/sys/net/core", limit).read_text()) >= _SOCKET_BUFFER:
            sock.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER)


def reset_on_close(sock: socket.socket) -> None:
    """Reset the connection on any close, so that the peer discards what it has not read yet."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER.pack(1, 0))


def check_peer(sock: socket.socket) -> None:
    """Raise ConnectionResetError if the peer is gone, even if bytes from it are still unread."""
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)  # poll always reports errors and hang-ups too
    if poll.poll(0):
        raise ConnectionResetError("the peer closed the connection")


def limit(sock: socket.socket, option: int, deadline: float) -> None:
    """Set the deadline (of `time.monotonic`) of the socket's next calls.

    Args:
        option: ``SO_RCVTIMEO`` or ``SO_SNDTIMEO``; ``SO_SNDTIMEO`` also bounds ``connect``.

    Raises:
        DeadlinePassed: the deadline has passed already.
    """
    if deadline == math.inf:
        sock.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(0, 0))
        return
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise DeadlinePassed
    seconds = int(remaining)
    micros = max(1, int((remaining - seconds) * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(seconds, micros))


def send(sock: socket.socket, views: Sequence[memoryview], deadline: float) -> None:
    """Send all bytes of ``views``.

    Raises:
        DeadlinePassed: the deadline passed.
        OSError: the peer is gone.
    """
    remaining = [view for view in views if view.nbytes]
    while remaining:
        limit(sock, socket.SO_SNDTIMEO, deadline)
        try:
            sent = sock.sendmsg(remaining[:_IOV_MAX])
        except BlockingIOError:
            raise DeadlinePassed from None
        remaining = _after(remaining, sent)


def receive_into(
    sock: socket.socket, views: Sequence[memoryview], deadline: float, *, unread: bool = True
) -> None:
    """Receive bytes until all of ``views`` are full.

    Args:
        unread: whether to accept bytes that a disconnected peer sent before it disconnected.

    Raises:
        DeadlinePassed: the deadline passed.
        OSError: the peer is gone or has closed the connection.
    """
    remaining = [view for view in views if view.nbytes]
    while remaining:
        if not unread:
            check_peer(sock)
        limit(sock, socket.SO_RCVTIMEO, deadline)
        try:
            received = sock.recvmsg_into(remaining[:_IOV_MAX], 0, socket.MSG_WAITALL)[0]
        except BlockingIOError:
            raise DeadlinePassed from None
        if received == 0:
            raise ConnectionResetError("the peer closed the connection")
        remaining = _after(remaining, received)


def receive(sock: socket.socket, nbytes: int, deadline: float) -> bytearray:
    """Receive ``nbytes`` bytes; raise as `receive_into`."""
    data = bytearray(nbytes)
    receive_into(sock, [memoryview(data)], deadline)
    return data


def _after(views: list[memoryview], done: int) -> list[memoryview]:
    """Return the parts of ``views`` after their first ``done`` bytes."""
    for at, view in enumerate(views):
        if done < view.nbytes:
            return [view[done:], *views[at + 1 :]]
        done -= view.nbytes
    return []


async def wait_until_gone(address: UnitAddress, token: bytes) -> str:
    """Wait until a unit is gone.

    The connection carries no data. The kernel closes it at once when the unit's process ends, and
    within seconds when its machine no longer answers. Ray itself detects a silent machine only
    after several failed health checks. A unit stopped by SIGSTOP keeps the connection.

    Returns:
        A sentence with the reason.
    """
    what = f"storage unit {address.unit!r} ({address.host}:{address.port}) is gone"
    writer = None
    try:
        async with asyncio.timeout(_CONNECT_S):
            reader, writer = await asyncio.open_connection(address.host, address.port)
            close_when_silent(writer.get_extra_info("socket"), PART_PROBE_S)
            writer.write(hello(token))
            answer = await reader.readexactly(1)
        if answer != ACCEPTED:
            return f"{what}: it refused the token"
        await reader.read(1)
    except TimeoutError as error:
        # The kernel's time-out, after unanswered probes, has a text.
        return f"{what}: {str(error) or 'no answer'}"
    except (OSError, asyncio.IncompleteReadError) as error:
        return f"{what}: {error}"
    finally:
        if writer is not None:
            writer.close()
    return f"{what}: its process ended"
