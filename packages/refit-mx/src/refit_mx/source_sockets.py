"""Moving buffers and frames over a blocking socket, each call with a deadline.

Time limits are the socket's own, so that one system call moves a whole buffer without being woken
for each part of it.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

from refit_mx.bounded_calls import BoundedCalls
from refit_mx.deadline import Deadline
from refit_mx.errors import ProtocolError
from refit_mx.source_protocol import LENGTH

MOST_BUFFERS = 512
"""Of one system call; Linux allows 1024."""
_TIMEVAL = struct.Struct("@ll")
_MAX_LOOKUPS = 64
"""Of host names, abandoned ones included, each a thread; one a name."""
_lookups: dict[str, BoundedCalls] = {}
_lookups_lock = threading.Lock()


def connect(host: str, port: int, deadline: Deadline) -> socket.socket:
    """Connect to the first address of a host that answers; all of them share the deadline.

    Raises:
        OSError: it has no address, or none can be connected to; a TimeoutError: not in time.
        RefitTimeoutError: the deadline has passed.
    """
    *others, last = _addresses(host, port, deadline)
    # No error is kept: with its frames it would keep alive what their callers hold.
    for tried, address in enumerate(others):
        with contextlib.suppress(OSError):
            return _connect_to(address, deadline.check("connecting") / (len(others) + 1 - tried))
    return _connect_to(last, deadline.check("connecting"))


def _connect_to(found: tuple[Any, ...], timeout_s: float) -> socket.socket:
    family, kind, protocol, _, address = found
    sock = socket.socket(family, kind, protocol)
    try:
        sock.settimeout(timeout_s)
        sock.connect(address)
    except BaseException:
        sock.close()
        raise
    return sock


# An entry is as `socket.getaddrinfo` has it, and an address differs by family.
def _addresses(host: str, port: int, deadline: Deadline) -> list[tuple[Any, ...]]:
    with contextlib.suppress(socket.gaierror, UnicodeError):  # it is no numeric address
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    with _lookups_lock:
        for name in [name for name, calls in _lookups.items() if not calls.busy]:
            del _lookups[name]
        if host not in _lookups and len(_lookups) >= _MAX_LOOKUPS:
            raise TimeoutError(f"{len(_lookups)} host names are being looked up")
        calls = _lookups.setdefault(host, BoundedCalls("refit-lookup"))
    lookup = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    try:
        return calls.call(lookup, deadline.check("looking up a host name"))
    except UnicodeError as error:
        raise OSError(f"{host[:80]!r} is no host name: {error}") from None


def send_buffers(sock: socket.socket, buffers: Sequence[memoryview], deadline: Deadline) -> None:
    """Send all of the buffers, without joining them.

    Raises:
        RefitTimeoutError: the peer did not take them in time.
        OSError: the connection broke.
    """
    for at in range(0, len(buffers), MOST_BUFFERS):
        rest = list(buffers[at : at + MOST_BUFFERS])
        while rest:
            _limit(sock, socket.SO_SNDTIMEO, deadline, "sending")
            try:
                sent = sock.sendmsg(rest)
            except BlockingIOError:
                continue  # the deadline is asked again
            rest = _behind(rest, sent)


def receive_buffers(sock: socket.socket, buffers: Sequence[memoryview], deadline: Deadline) -> None:
    """Fill all of the buffers, and tell the deadline of what comes.

    Raises:
        RefitTimeoutError: the peer did not send enough in time.
        ConnectionError: the peer closed the connection.
        OSError: it broke.
    """
    for at in range(0, len(buffers), MOST_BUFFERS):
        rest = list(buffers[at : at + MOST_BUFFERS])
        while rest:
            _limit(sock, socket.SO_RCVTIMEO, deadline, "receiving")
            try:
                received = sock.recvmsg_into(rest, 0, socket.MSG_WAITALL)[0]
            except BlockingIOError:
                continue
            if not received:
                raise ConnectionError("the peer closed the connection")
            deadline.moved()
            rest = _behind(rest, received)


def receive_length(sock: socket.socket, most: int, deadline: Deadline) -> int:
    """A length of at most ``most``.

    Raises:
        ProtocolError: a larger one.
        RefitTimeoutError, OSError: as `receive_buffers`.
    """
    head = bytearray(LENGTH.size)
    receive_buffers(sock, [memoryview(head)], deadline)
    length: int = LENGTH.unpack(head)[0]
    if length > most:
        raise ProtocolError(f"a peer announced {length} bytes; at most {most} are allowed here")
    return length


def receive_frame(sock: socket.socket, most: int, deadline: Deadline) -> bytearray:
    """A frame's message. Memory grows with what arrives, not with what was announced.

    Raises:
        ProtocolError: it is longer than ``most``.
        RefitTimeoutError, OSError: as `receive_buffers`.
    """
    left = receive_length(sock, most, deadline)
    data = bytearray()
    while left:
        part = bytearray(min(left, 1 << 16))
        receive_buffers(sock, [memoryview(part)], deadline)
        data += part
        left -= len(part)
    return data


def _limit(sock: socket.socket, option: int, deadline: Deadline, doing: str) -> None:
    # 0 would mean no limit.
    micros = max(1000, int(min(deadline.check(doing), deadline.most_wait_s) * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(*divmod(micros, 1_000_000)))


def _behind(buffers: list[memoryview], count: int) -> list[memoryview]:
    for index, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[index + 1 :]]
        count -= len(buffer)
    return []
