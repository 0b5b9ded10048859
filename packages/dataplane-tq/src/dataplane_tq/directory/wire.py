"""Protocol between clients and the directory: framed msgpack over TCP, without pickle.

A client operation owns one connection from its first request to its last. If it fails, or its
process dies, the connection closes and the server undoes the operation.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar  # Any: the answer's type is the request's

import msgspec

from dataplane_core import (
    ClosedError,
    DataPlaneError,
    DeadlineExceededError,
    InvalidRequestError,
    UnavailableError,
    errors,
)
from dataplane_tq.sockets import CLIENT_PROBE_S, close_when_silent, limit_unacknowledged

T = TypeVar("T")

HEADER = struct.Struct("<I")
MAX_FRAME = 1 << 28
TOKEN_BYTES = 32
_CONNECT_S = 5.0
_GRACE_S = 1.0
_MAX_IDLE = 8


class Failure(msgspec.Struct, frozen=True):
    """A `DataPlaneError` in serialized form.

    Attributes:
        kind: name of the error's class.
        message: text of the error.
        facts: attributes of the error.
    """

    kind: str
    message: str
    facts: dict[str, Any] = {}

    @classmethod
    def of(cls, error: DataPlaneError) -> Failure:
        """Serialize ``error``."""
        return cls(type(error).__name__, str(error), dict(vars(error)))

    def raised(self) -> DataPlaneError:
        """Return the error to raise."""
        kind = getattr(errors, self.kind, None)
        if not (isinstance(kind, type) and issubclass(kind, DataPlaneError)):
            return UnavailableError(f"{self.kind}: {self.message}")
        error: DataPlaneError = kind(self.message, **self.facts)
        return error


class Reply(msgspec.Struct, frozen=True, array_like=True):
    """Reply to one request: the encoded answer, or a failure."""

    answer: msgspec.Raw = msgspec.Raw(b"\xc0")
    failure: Failure | None = None


_encoder = msgspec.msgpack.Encoder()
_replies = msgspec.msgpack.Decoder(Reply)
_answers: dict[Any, msgspec.msgpack.Decoder[Any]] = {}
_making_decoders = threading.Lock()


class Address(msgspec.Struct, frozen=True):
    """Address of the directory, and the secret token that a connection must send first.

    Clients get both through Ray; the token is never logged.
    """

    host: str
    port: int
    token: bytes


class Link:
    """Pool of this process's connections to the directory.

    Args:
        address: address of the directory.
        timeout_s: default deadline of a request, in seconds.
    """

    def __init__(self, address: Address, *, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._address = address
        self._idle: list[socket.socket] = []
        self._open: weakref.WeakSet[Session] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._closed = False

    @contextmanager
    def session(self, what: str) -> Iterator[Session]:
        """Open a session for one operation; ``what`` names it in errors.

        After `Session.detach` the session outlives the ``with`` block, until `end`.
        """
        session = self._begin(what)
        try:
            yield session
        except BaseException:  # closing the connection makes the directory undo the operation
            session.close()
            raise
        if not session.is_detached:
            self.end(session)

    def end(self, session: Session) -> None:
        """End a successful operation, and keep its connection unless enough are idle."""
        with self._lock:
            self._open.discard(session)
            reusable = len(self._idle) < _MAX_IDLE and not self._closed
            if reusable and os.getpid() == self._pid:
                self._idle.append(session.connection)
                return
        session.close()

    def ask(self, what: str, request: Any, answer: type[T], timeout_s: float | None = None) -> T:
        """Send one request in a separate session, and return its answer."""
        with self.session(what) as session:
            return session.ask(request, answer, timeout_s)

    def _begin(self, what: str) -> Session:
        with self._lock:
            if os.getpid() != self._pid:
                # After a fork both processes hold the sockets; only the parent uses them.
                self._idle, self._pid = [], os.getpid()
                self._open = weakref.WeakSet()
            connection = None
            while self._idle and connection is None:
                connection = self._idle.pop()
                if _is_closed(connection):
                    connection.close()
                    connection = None
        session = Session(connection or self._connect(what), what, self.timeout_s)
        with self._lock:
            if not self._closed:
                self._open.add(session)
                return session
        session.close()
        raise _closed(what)

    def _connect(self, what: str) -> socket.socket:
        address = (self._address.host, self._address.port)
        try:
            connection = socket.create_connection(address, min(_CONNECT_S, self.timeout_s))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            close_when_silent(connection, CLIENT_PROBE_S)
            connection.sendall(self._address.token)
        except OSError as error:
            raise UnavailableError(f"{what}: the partition directory is gone: {error}") from error
        return connection

    def close(self) -> None:
        """Close the connections; operations under way in other threads raise `ClosedError`.

        Detached sessions stay open until their owner ends them.
        """
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            sessions = list(self._open) if os.getpid() == self._pid else []
        for connection in idle:
            connection.close()
        for session in sessions:
            if not session.is_detached:
                session.interrupt()


class Session:
    """Connection of one operation.

    Attributes:
        connection: the socket.
        is_detached: whether the operation outlives the ``with`` block that began it.
    """

    def __init__(self, connection: socket.socket, what: str, timeout_s: float) -> None:
        self.connection = connection
        self.is_detached = False
        self._what = what
        self._timeout_s = timeout_s
        self._interrupted = False

    def ask(self, request: Any, answer: type[T], timeout_s: float | None = None) -> T:
        """Send a request and return its answer.

        Args:
            request: a request of `dataplane_tq.directory.protocol`.
            answer: type of the answer.
            timeout_s: deadline of the answer, in seconds; None means the link's default.

        Raises:
            DataPlaneError: the error that the server raised.
            UnavailableError: the directory is gone.
            DeadlineExceededError: the directory did not answer.
            InvalidRequestError: the request is too large to send.
            ClosedError: the link was closed meanwhile.
        """
        limit = self._timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit + _GRACE_S
        self.send(request, min(limit, self._timeout_s))
        try:
            (length,) = HEADER.unpack(self._receive(HEADER.size, deadline))
            reply = _replies.decode(self._receive(length, deadline))
        except (OSError, EOFError) as error:
            raise self._failed(error, limit) from error
        if reply.failure is not None:
            raise reply.failure.raised()
        return _decoder_of(answer).decode(reply.answer)

    def send(self, request: Any, timeout_s: float | None = None) -> None:
        """Send a request that has no answer; raise as `ask`."""
        limit = self._timeout_s if timeout_s is None else timeout_s
        body = _encoder.encode(request)
        if len(body) > MAX_FRAME:
            raise InvalidRequestError(
                f"{self._what}: the request to the partition directory has {len(body)} bytes, "
                f"and the limit is {MAX_FRAME}; pass fewer samples at once, or smaller tags"
            )
        try:
            self.connection.settimeout(limit)
            limit_unacknowledged(self.connection, len(body), CLIENT_PROBE_S)
            self.connection.sendall(HEADER.pack(len(body)) + body)
        except OSError as error:
            raise self._failed(error, limit) from error

    def _failed(self, error: Exception, limit: float) -> DataPlaneError:
        if self._interrupted:
            return _closed(self._what)
        # Python's own time-out has no errno; the kernel's, for a silent machine, has one.
        if isinstance(error, TimeoutError) and error.errno is None:
            return DeadlineExceededError(
                f"{self._what}: no answer from the partition directory after {limit:g} s"
            )
        return UnavailableError(
            f"{self._what}: the partition directory is gone: {error}; or it has too many "
            "connections, and its log has connection_refused"
        )

    def detach(self) -> None:
        """Let the session outlive its ``with`` block, until `Link.end` or `close`."""
        self.is_detached = True

    def close(self) -> None:
        """Abort the operation; the directory undoes it."""
        self.connection.close()

    def interrupt(self) -> None:
        """Abort the operation from another thread; the operation's thread gets `ClosedError`."""
        self._interrupted = True
        with suppress(OSError):  # the connection is closed already
            self.connection.shutdown(socket.SHUT_RDWR)

    def _receive(self, count: int, deadline: float) -> bytearray:
        data = bytearray(count)
        view = memoryview(data)
        while view:
            self.connection.settimeout(max(0.001, deadline - time.monotonic()))
            count = self.connection.recv_into(view)
            if not count:
                raise EOFError("connection closed")
            view = view[count:]
        return data


def _is_closed(idle: socket.socket) -> bool:
    """Return True if the peer or the kernel closed an idle connection.

    No data arrives on an idle connection, so it is readable only when it is closed.
    """
    poll = select.poll()
    poll.register(idle, select.POLLIN)
    return bool(poll.poll(0))


def _closed(what: str) -> ClosedError:
    return ClosedError(f"{what}: the TransferQueue client was closed; build a new one")


def _decoder_of(answer: type[T]) -> msgspec.msgpack.Decoder[T]:
    decoder = _answers.get(answer)
    if decoder is None:
        # msgspec crashes the process if two threads build decoders of a new type at once.
        with _making_decoders:
            decoder = _answers[answer] = msgspec.msgpack.Decoder(answer)
    return decoder
