"""Sending and receiving of buffers and frames over a blocking socket, with a deadline per call.

The time limit is set on the socket, so that one system call moves a complete buffer without waking
this process for each part of it.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

from refit_mx.concurrency import BoundedCalls
from refit_mx.deadline import Deadline
from refit_mx.errors import ProtocolError
from refit_mx.transports.source_protocol import LENGTH

MAX_BUFFERS = 512
"""Buffers in one system call; Linux allows 1024."""
_TIMEVAL = struct.Struct("@ll")
_MAX_LOOKUPS = 64
"""Limit of names that are being looked up, each in a thread, including abandoned lookups."""
_lookups: dict[str, BoundedCalls] = {}
_lookups_lock = threading.Lock()


def connect(host: str, port: int, deadline: Deadline) -> socket.socket:
    """Connect to the first address of a host that answers; all addresses share the deadline.

    Raises:
        OSError: the host has no address, or no address accepts a connection; `TimeoutError` if
            none does so in time.
        RefitTimeoutError: the deadline has passed.
    """
    *others, last = _addresses(host, port, deadline)
    # Errors are dropped: their frames would keep alive what their callers hold.
    for tried, address in enumerate(others):
        with contextlib.suppress(OSError):
            return _connect_to(address, deadline.check("connecting") / (len(others) + 1 - tried))
    return _connect_to(last, deadline.check("connecting"))


def _connect_to(entry: tuple[Any, ...], timeout_s: float) -> socket.socket:
    family, kind, protocol, _, address = entry
    sock = socket.socket(family, kind, protocol)
    try:
        sock.settimeout(timeout_s)
        sock.connect(address)
    except BaseException:  # close it also on an interrupt
        sock.close()
        raise
    return sock


# An entry has the form of `socket.getaddrinfo`; its address differs by family.
def _addresses(host: str, port: int, deadline: Deadline) -> list[tuple[Any, ...]]:
    with contextlib.suppress(socket.gaierror, UnicodeError):  # not a numeric address
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
    """Send all buffers without joining them.

    Raises:
        RefitTimeoutError: the peer did not accept them in time.
        OSError: the connection broke.
    """
    for at in range(0, len(buffers), MAX_BUFFERS):
        rest = list(buffers[at : at + MAX_BUFFERS])
        while rest:
            _limit(sock, socket.SO_SNDTIMEO, deadline, "sending")
            try:
                sent = sock.sendmsg(rest)
            except BlockingIOError:
                continue  # check the deadline again
            rest = _after(rest, sent)


def receive_buffers(sock: socket.socket, buffers: Sequence[memoryview], deadline: Deadline) -> None:
    """Fill all buffers, and record progress in the deadline.

    Raises:
        RefitTimeoutError: the peer did not send enough in time.
        ConnectionError: the peer closed the connection.
        OSError: the connection broke.
    """
    for at in range(0, len(buffers), MAX_BUFFERS):
        rest = list(buffers[at : at + MAX_BUFFERS])
        while rest:
            _limit(sock, socket.SO_RCVTIMEO, deadline, "receiving")
            try:
                received = sock.recvmsg_into(rest, 0, socket.MSG_WAITALL)[0]
            except BlockingIOError:
                continue
            if not received:
                raise ConnectionError("the peer closed the connection")
            deadline.record_progress()
            rest = _after(rest, received)


def receive_length(sock: socket.socket, maximum: int, deadline: Deadline) -> int:
    """Receive a length of at most ``maximum``.

    Raises:
        ProtocolError: the length is larger.
        RefitTimeoutError, OSError: as in `receive_buffers`.
    """
    head = bytearray(LENGTH.size)
    receive_buffers(sock, [memoryview(head)], deadline)
    length: int = LENGTH.unpack(head)[0]
    if length > maximum:
        raise ProtocolError(f"a peer announced {length} bytes; at most {maximum} are allowed here")
    return length


def receive_frame(sock: socket.socket, maximum: int, deadline: Deadline) -> bytearray:
    """Receive a frame's message, allocating memory only for bytes that arrive.

    Raises:
        ProtocolError: the message is longer than ``maximum``.
        RefitTimeoutError, OSError: as in `receive_buffers`.
    """
    remaining = receive_length(sock, maximum, deadline)
    data = bytearray()
    while remaining:
        part = bytearray(min(remaining, 1 << 16))
        receive_buffers(sock, [memoryview(part)], deadline)
        data += part
        remaining -= len(part)
    return data


def _limit(sock: socket.socket, option: int, deadline: Deadline, doing: str) -> None:
    # 0 would mean no limit.
    micros = max(1000, int(min(deadline.check(doing), deadline.max_wait_s) * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(*divmod(micros, 1_000_000)))


def _after(buffers: list[memoryview], count: int) -> list[memoryview]:
    for index, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[index + 1 :]]
        count -= len(buffer)
    return []
