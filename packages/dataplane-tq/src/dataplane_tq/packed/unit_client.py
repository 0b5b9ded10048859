"""Reads and writes of a storage unit's memory, from any process on any node.

On the unit's node the client maps the unit's memory, and reads are views of it; from elsewhere
bytes go over TCP. Which of the two, the first connection decides.

A client may be used by several threads and after a fork: connections belong to the process that
made them.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dataplane_core import DeadlineExceededError, InvalidRequestError, UnavailableError, pages
from dataplane_core.slices import Slices
from dataplane_tq.packed import unit_wire as wire
from dataplane_tq.packed.arena import Arena
from dataplane_tq.packed.side_by_side import Piece, run_all, shares
from dataplane_tq.packed.unit_wire import UnitAddress

Transport = Literal["auto", "shm", "tcp"]
Bytes = NDArray[np.uint8]

_MOST_IDLE = 8


class _Refused(Exception):
    """The unit does not know the token."""


class _Connections:
    """What one process has open to the unit."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.lock = threading.Lock()
        self.memory: Arena | None = None
        self.lifeline: socket.socket | None = None
        self.idle: list[socket.socket] = []

    def close(self) -> None:
        for sock in self.idle:
            sock.close()
        self.idle = []
        if self.lifeline is not None:
            self.lifeline.close()
            self.lifeline = None
        if self.memory is not None:
            self.memory.close()
            self.memory = None


class UnitClient:
    """Access to one storage unit. Building one does no I/O; the first call connects.

    Args:
        address: of the unit.
        token: the unit's.
        transport: ``shm`` for its node only, ``tcp`` from anywhere, ``auto`` for ``shm`` where the
            unit's Unix socket is found and ``tcp`` elsewhere.
    """

    def __init__(
        self, address: UnitAddress, token: bytes, *, transport: Transport = "auto"
    ) -> None:
        self._address = address
        self._hello = wire.hello(token)
        self._transport = transport
        self._connections = _Connections()

    @property
    def zero_copy(self) -> bool:
        """Whether `read` returns views of the unit's memory; known once `connect` returned."""
        return self._transport == "shm"

    def connect(self, timeout_s: float) -> None:
        """Settle the transport; `write` and `read` do it by themselves.

        Raises:
            UnavailableError: if the unit is gone or refuses the token.
            DeadlineExceededError: at the deadline.
        """
        deadline = time.monotonic() + timeout_s
        with self._errors("connect", timeout_s):
            if self._memory(deadline) is None:
                self._give(self._take(deadline))

    def write(self, pieces: Sequence[Piece], timeout_s: float) -> None:
        """Write each piece at its offset. Returns when all bytes are in the unit's memory.

        Args:
            pieces: offsets and the slices that go there, one after the other.
            timeout_s: seconds to wait at most.

        Raises:
            InvalidRequestError: if a piece lies outside the unit's memory; nothing was written.
            UnavailableError: if the unit is gone; some bytes may have been written.
            DeadlineExceededError: at the deadline; some bytes may have been written, and those
                under way may still be until a moment later.
        """
        deadline = time.monotonic() + timeout_s
        ranges = [(offset, offset + piece.nbytes) for offset, piece in pieces]
        self._check(ranges)
        with self._errors("write", timeout_s):
            memory = self._memory(deadline)
            if memory is not None:
                for (start, stop), (_, piece) in zip(ranges, pieces, strict=True):
                    piece.copy_into(memory[start:stop])
                self._check_alive()
                return
            run_all(partial(self._send, share, deadline) for share in shares(pieces))

    def read(self, ranges: Sequence[tuple[int, int]], timeout_s: float) -> Bytes:
        """The bytes of the ranges ``(start, stop)``, one after the other.

        With `zero_copy` a single range is a read-only view of the unit's memory, which shows what
        is written there later. Otherwise the answer is the caller's own.

        Raises:
            InvalidRequestError: if a range lies outside the unit's memory.
            UnavailableError: if the unit is gone.
            DeadlineExceededError: at the deadline.
        """
        deadline = time.monotonic() + timeout_s
        self._check(ranges)
        with self._errors("read", timeout_s):
            memory = self._memory(deadline)
            sizes = [stop - start for start, stop in ranges]
            if memory is not None:
                data = Slices(memory.view(), [start for start, _ in ranges], sizes).joined()
                data.flags.writeable = len(ranges) > 1
                return data
            data = pages.empty(sum(sizes))
            at = 0
            for first in range(0, len(ranges), wire.MOST_RANGES):
                asked = ranges[first : first + wire.MOST_RANGES]
                size = sum(sizes[first : first + wire.MOST_RANGES])
                self._fetch_frame(asked, [data[at : at + size].data], deadline)
                at += size
            return data

    def read_into(
        self, ranges: Sequence[tuple[int, int]], into: Sequence[memoryview], timeout_s: float
    ) -> None:
        """Fill ``into``, one after the other, with the bytes of the ranges. Raises as `read`."""
        deadline = time.monotonic() + timeout_s
        self._check(ranges)
        with self._errors("read", timeout_s):
            if self._memory(deadline) is None and len(ranges) <= wire.MOST_RANGES:
                self._fetch_frame(ranges, into, deadline)
                return
        data, at = self.read(ranges, timeout_s).data, 0
        for view in into:
            view[:] = data[at : at + view.nbytes]
            at += view.nbytes

    def close(self) -> None:
        """Close the connections of this process. Views that `read` returned stay valid."""
        connections = self._current()
        with connections.lock:
            connections.close()

    def _current(self) -> _Connections:
        if self._connections.pid != os.getpid():
            # Forked: what was inherited is the parent's, and its lock may be held for ever.
            inherited, self._connections = self._connections, _Connections()
            inherited.close()
        return self._connections

    @contextmanager
    def _errors(self, operation: str, timeout_s: float) -> Iterator[None]:
        address = self._address
        what = (
            f"{operation} on storage unit {address.unit!r} "
            f"({address.host}:{address.port}, process {address.pid})"
        )
        try:
            yield
        except wire.Late:
            raise DeadlineExceededError(f"{what}: no answer within {timeout_s} s") from None
        except _Refused:
            raise UnavailableError(f"{what}: the unit refused the token") from None
        except OSError as error:
            raise UnavailableError(f"{what}: the unit is gone: {error}") from None

    def _check(self, ranges: Sequence[tuple[int, int]]) -> None:
        capacity = self._address.capacity
        for start, stop in ranges:
            if not 0 <= start <= stop <= capacity:
                raise InvalidRequestError(
                    f"bytes {start}..{stop} of storage unit {self._address.unit!r}, which has "
                    f"{capacity}"
                )

    def _memory(self, deadline: float) -> Bytes | None:
        """The unit's memory, or None if it is reached over TCP."""
        if self._transport == "tcp":
            return None
        connections = self._current()
        if not connections.lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise wire.Late
        try:
            if connections.memory is None:
                try:
                    self._attach(connections, deadline)
                except ConnectionRefusedError:
                    # Nobody on this node listens by that name.
                    if self._transport == "shm":
                        raise
                    self._transport = "tcp"
                    return None
                self._transport = "shm"
            assert connections.memory is not None
            memory = connections.memory.buffer
        finally:
            connections.lock.release()
        self._check_alive()
        return memory

    def _attach(self, connections: _Connections, deadline: float) -> None:
        sock = self._open(socket.AF_UNIX, "\0" + self._address.unix, deadline)
        try:
            wire.limit(sock, socket.SO_RCVTIMEO, deadline)
            try:
                answer, fds, _, _ = socket.recv_fds(sock, 1, 1, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                raise wire.Late from None
            _check_answer(answer)
            arena = Arena.attach(fds[0], self._address.capacity)
        except BaseException:
            sock.close()
            raise
        connections.memory, connections.lifeline = arena, sock

    def _check_alive(self) -> None:
        """Raise ConnectionResetError if the unit has closed the connection that shows it lives."""
        connections = self._current()
        lifeline = connections.lifeline
        try:
            alive = lifeline is not None and lifeline.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        if not alive:
            with connections.lock:
                if connections.lifeline is lifeline:
                    connections.close()
            raise ConnectionResetError("it closed the connection")

    def _open(
        self, family: socket.AddressFamily, address: str | tuple[str, int], deadline: float
    ) -> socket.socket:
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            if family != socket.AF_UNIX:
                wire.enlarge(sock)
                wire.tune(sock)
                wire.reset_on_close(sock)  # a write that is given up must not be done later
            wire.limit(sock, socket.SO_SNDTIMEO, deadline)
            try:
                sock.connect(address)
            except BlockingIOError:
                raise wire.Late from None
            wire.send(sock, [memoryview(self._hello)], deadline)
        except BaseException:
            sock.close()
            raise
        return sock

    def _take(self, deadline: float) -> socket.socket:
        """A TCP connection for one exchange."""
        try:
            return self._current().idle.pop()
        except IndexError:
            pass
        host = self._address.host
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = self._open(family, (host, self._address.port), deadline)
        try:
            _check_answer(wire.receive(sock, 1, deadline))
        except BaseException:
            sock.close()
            raise
        return sock

    def _give(self, sock: socket.socket) -> None:
        idle = self._current().idle
        if len(idle) < _MOST_IDLE:
            idle.append(sock)
        else:
            sock.close()

    @contextmanager
    def _exchange(self, deadline: float) -> Iterator[socket.socket]:
        sock = self._take(deadline)
        try:
            yield sock
        except BaseException:
            sock.close()  # half a frame may be under way
            raise
        self._give(sock)

    def _send(self, pieces: Sequence[Piece], deadline: float) -> None:
        for at in range(0, len(pieces), wire.MOST_RANGES):
            self._send_frame(pieces[at : at + wire.MOST_RANGES], deadline)

    def _send_frame(self, pieces: Sequence[Piece], deadline: float) -> None:
        header = _frame(wire.WRITE, [(offset, piece.nbytes) for offset, piece in pieces], deadline)
        with self._exchange(deadline) as sock:
            views = [view for _, piece in pieces for view in piece.views()]
            wire.send(sock, [memoryview(header), *views], deadline)
            wire.receive(sock, 1, deadline)

    def _fetch_frame(
        self, ranges: Sequence[tuple[int, int]], into: Sequence[memoryview], deadline: float
    ) -> None:
        if not any(view.nbytes for view in into):
            return
        header = _frame(wire.READ, [(start, stop - start) for start, stop in ranges], deadline)
        with self._exchange(deadline) as sock:
            wire.send(sock, [memoryview(header)], deadline)
            wire.receive_into(sock, into, deadline)


def _frame(command: bytes, ranges: list[tuple[int, int]], deadline: float) -> bytes:
    budget_ms = min(max(0, int((deadline - time.monotonic()) * 1000)), 2**32 - 1)
    nbytes = sum(size for _, size in ranges)
    header = wire.FRAME.pack(command, len(ranges), budget_ms, nbytes)
    return header + np.array(ranges, wire.RANGES).tobytes()


def _check_answer(answer: bytes | bytearray) -> None:
    if answer == wire.REFUSED:
        raise _Refused
    if answer != wire.ACCEPTED:
        raise ConnectionResetError("the unit closed the connection")
