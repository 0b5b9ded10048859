"""Client of a storage unit's memory, for any process on any node.

On the unit's node the client maps the memory, and reads are views of it. On other nodes the bytes
go over TCP. The first connection selects the transport.

Threads may share a client. It also works after a fork: connections belong to the process that
opened them.
"""

from __future__ import annotations

import errno
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
from dataplane_tq.packed import unit_wire as wire
from dataplane_tq.packed.arena import Arena
from dataplane_tq.packed.parallel import Write, run_all, split
from dataplane_tq.packed.slices import Slices
from dataplane_tq.packed.unit_wire import UnitAddress

Transport = Literal["auto", "shm", "tcp"]
Bytes = NDArray[np.uint8]

_MAX_IDLE = 8


class _TokenRefused(Exception):
    """Refusal of the token by the unit."""


class _Connections:
    """Connections of one process to the unit."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.lock = threading.Lock()
        self.memory: Arena | None = None
        self.liveness: socket.socket | None = None
        self.idle: list[socket.socket] = []

    def close(self) -> None:
        for sock in self.idle:
            sock.close()
        self.idle = []
        if self.liveness is not None:
            self.liveness.close()
            self.liveness = None
        if self.memory is not None:
            self.memory.close()
            self.memory = None


class UnitClient:
    """Client of one storage unit. Building one does no I/O; the first call connects.

    Args:
        address: address of the unit.
        token: secret to send to the unit.
        transport: ``shm`` works on the unit's node only, ``tcp`` anywhere; ``auto`` is ``shm`` if
            the unit's Unix socket exists on this node, else ``tcp``.
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
        """True if `read` returns views of the unit's memory; valid after `connect`."""
        return self._transport == "shm"

    def connect(self, timeout_s: float) -> None:
        """Select the transport; `write` and `read` do so too.

        Raises:
            UnavailableError: the unit is gone or refuses the token.
            DeadlineExceededError: the deadline passed.
        """
        deadline = time.monotonic() + timeout_s
        with self._errors("connect", timeout_s):
            if self._memory(deadline) is None:
                self._return(self._take(deadline))

    def write(self, writes: Sequence[Write], timeout_s: float) -> None:
        """Write all bytes at their offsets; return when they are in the unit's memory.

        Args:
            writes: offsets, each with the slices to write there contiguously.
            timeout_s: deadline in seconds.

        Raises:
            InvalidRequestError: a write is outside the unit's memory; nothing was written.
            UnavailableError: the unit is gone; some bytes may have been written.
            DeadlineExceededError: the deadline passed; some bytes may have been written, and bytes
                in flight may still be written a moment later.
        """
        deadline = time.monotonic() + timeout_s
        ranges = [(offset, offset + data.nbytes) for offset, data in writes]
        self._check(ranges)
        with self._errors("write", timeout_s):
            memory = self._memory(deadline)
            if memory is not None:
                for (start, stop), (_, data) in zip(ranges, writes, strict=True):
                    data.copy_into(memory[start:stop])
                self._check_alive()
                return
            run_all(partial(self._send, part, deadline) for part in split(writes))

    def read(self, ranges: Sequence[tuple[int, int]], timeout_s: float) -> Bytes:
        """Return the concatenated bytes of the ranges ``(start, stop)``.

        With `zero_copy` a single range is returned as a read-only view of the unit's memory, which
        also shows later writes. Otherwise the result is a copy.

        Raises:
            InvalidRequestError: a range is outside the unit's memory.
            UnavailableError: the unit is gone.
            DeadlineExceededError: the deadline passed.
        """
        deadline = time.monotonic() + timeout_s
        self._check(ranges)
        with self._errors("read", timeout_s):
            return self._read(ranges, deadline)

    def read_into(
        self, ranges: Sequence[tuple[int, int]], into: Sequence[memoryview], timeout_s: float
    ) -> None:
        """Fill the views ``into`` in sequence with the bytes of the ranges; raise as `read`."""
        deadline = time.monotonic() + timeout_s
        self._check(ranges)
        with self._errors("read", timeout_s):
            if self._memory(deadline) is None and len(ranges) <= wire.MAX_RANGES:
                self._read_frame(ranges, into, deadline)
                return
            data, at = self._read(ranges, deadline).data, 0
        for view in into:
            view[:] = data[at : at + view.nbytes]
            at += view.nbytes

    def _read(self, ranges: Sequence[tuple[int, int]], deadline: float) -> Bytes:
        memory = self._memory(deadline)
        sizes = [stop - start for start, stop in ranges]
        if memory is not None:
            data = Slices(memory.view(), [start for start, _ in ranges], sizes).joined()
            data.flags.writeable = len(ranges) > 1
            return data
        data = pages.empty(sum(sizes))
        at = 0
        for first in range(0, len(ranges), wire.MAX_RANGES):
            batch = ranges[first : first + wire.MAX_RANGES]
            size = sum(sizes[first : first + wire.MAX_RANGES])
            self._read_frame(batch, [data[at : at + size].data], deadline)
            at += size
        return data

    def close(self) -> None:
        """Close the connections of this process; views that `read` returned stay valid."""
        connections = self._current()
        with connections.lock:
            connections.close()

    def _current(self) -> _Connections:
        if self._connections.pid != os.getpid():
            # After a fork the inherited connections are the parent's, and their lock may be held
            # by a thread that does not exist here.
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
        except wire.DeadlinePassed:
            raise DeadlineExceededError(f"{what}: no answer within {timeout_s} s") from None
        except _TokenRefused:
            raise UnavailableError(f"{what}: the unit refused the token") from None
        except OSError as error:
            raise UnavailableError(f"{what}: the unit is gone: {error}") from None

    def _check(self, ranges: Sequence[tuple[int, int]]) -> None:
        capacity = self._address.capacity
        for start, stop in ranges:
            if not 0 <= start <= stop <= capacity:
                raise InvalidRequestError(
                    f"bytes {start}..{stop} are outside of storage unit {self._address.unit!r} "
                    f"with {capacity} bytes"
                )

    def _memory(self, deadline: float) -> Bytes | None:
        """Return the unit's memory, or None if the transport is TCP."""
        if self._transport == "tcp":
            return None
        connections = self._current()
        if not connections.lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise wire.DeadlinePassed
        try:
            if connections.memory is None:
                try:
                    self._attach(connections, deadline)
                except ConnectionRefusedError:
                    # The unit's Unix socket is not on this node.
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
        with wire.closed_on_error(sock):
            wire.limit(sock, socket.SO_RCVTIMEO, deadline)
            try:
                answer, fds, _, _ = socket.recv_fds(sock, 1, 1, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                raise wire.DeadlinePassed from None
            _check_answer(answer)
            if not fds:  # the kernel drops a descriptor for which this process has no number left
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            arena = Arena.attach(fds[0], self._address.capacity)
        connections.memory, connections.liveness = arena, sock

    def _check_alive(self) -> None:
        """Raise ConnectionResetError if the unit has closed the liveness connection."""
        connections = self._current()
        liveness = connections.liveness
        try:
            alive = liveness is not None and liveness.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        if not alive:
            with connections.lock:
                if connections.liveness is liveness:
                    connections.close()
            raise ConnectionResetError("the unit closed the connection")

    def _open(
        self, family: socket.AddressFamily, address: str | tuple[str, int], deadline: float
    ) -> socket.socket:
        sock = socket.socket(family, socket.SOCK_STREAM)
        with wire.closed_on_error(sock):
            if family != socket.AF_UNIX:
                wire.enlarge(sock)
                wire.tune(sock)
                wire.reset_on_close(sock)  # the unit must not apply an abandoned write later
            wire.limit(sock, socket.SO_SNDTIMEO, deadline)
            try:
                sock.connect(address)
            except BlockingIOError:
                raise wire.DeadlinePassed from None
            wire.send(sock, [memoryview(self._hello)], deadline)
        return sock

    def _take(self, deadline: float) -> socket.socket:
        """Take an idle TCP connection, or open one."""
        try:
            return self._current().idle.pop()
        except IndexError:
            pass
        host = self._address.host
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = self._open(family, (host, self._address.port), deadline)
        with wire.closed_on_error(sock):
            _check_answer(wire.receive(sock, 1, deadline))
        return sock

    def _return(self, sock: socket.socket) -> None:
        idle = self._current().idle
        if len(idle) < _MAX_IDLE:
            idle.append(sock)
        else:
            sock.close()

    @contextmanager
    def _exchange(self, deadline: float) -> Iterator[socket.socket]:
        sock = self._take(deadline)
        with wire.closed_on_error(sock):  # an interrupted frame makes the connection unusable
            yield sock
        self._return(sock)

    def _send(self, writes: Sequence[Write], deadline: float) -> None:
        for first in range(0, len(writes), wire.MAX_RANGES):
            batch = writes[first : first + wire.MAX_RANGES]
            ranges = [(offset, data.nbytes) for offset, data in batch]
            header = _frame(wire.WRITE, ranges, deadline)
            with self._exchange(deadline) as sock:
                views = [view for _, data in batch for view in data.views()]
                wire.send(sock, [memoryview(header), *views], deadline)
                wire.receive(sock, 1, deadline)

    def _read_frame(
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
        raise _TokenRefused
    if answer != wire.ACCEPTED:
        raise ConnectionResetError("the unit closed the connection")
