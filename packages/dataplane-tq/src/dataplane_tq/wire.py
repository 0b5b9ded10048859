"""Framed msgpack over TCP: how clients talk to the directory. No pickle crosses it.

A client operation owns one connection from its first request to its last. If it ends badly (an
exception, a killed process) the connection ends with it, and the server undoes what was under way.
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
from dataplane_tq.keepalive import CLIENT_TURN_S, end_when_silent, expect_acknowledgement

T = TypeVar("T")

HEADER = struct.Struct("<I")
MAX_FRAME = 1 << 28
TOKEN_BYTES = 32
_CONNECT_S = 5.0
_GRACE_S = 1.0


class Failure(msgspec.Struct, frozen=True):
    """An error of our tree on its way to the client that asked.

    Attributes:
        kind: name of the class.
        message: what it says.
        facts: its attributes.
    """

    kind: str
    message: str
    facts: dict[str, Any] = {}

    @classmethod
    def of(cls, error: DataPlaneError) -> Failure:
        """Describe ``error``."""
        return cls(type(error).__name__, str(error), dict(vars(error)))

    def raised(self) -> DataPlaneError:
        """The error again."""
        kind = getattr(errors, self.kind, None)
        if not (isinstance(kind, type) and issubclass(kind, DataPlaneError)):
            return UnavailableError(f"{self.kind}: {self.message}")
        error: DataPlaneError = (
            kind(self.message, **self.facts) if self.facts else kind(self.message)
        )
        return error


class Reply(msgspec.Struct, frozen=True, array_like=True):
    """One answer: its msgpack, or the failure in its place."""

    answer: msgspec.Raw = msgspec.Raw(b"\xc0")
    failure: Failure | None = None


_encoder = msgspec.msgpack.Encoder()
_replies = msgspec.msgpack.Decoder(Reply)
_answers: dict[Any, msgspec.msgpack.Decoder[Any]] = {}
_making_decoders = threading.Lock()


class Address(msgspec.Struct, frozen=True):
    """Where the directory listens, and the secret that opens it (from Ray, never logged)."""

    host: str
    port: int
    token: bytes


class Link:
    """This process's connections to the directory.

    Args:
        address: of the directory.
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
        """A connection for one operation; ``what`` names it in errors.

        It outlives the block if `Session.keep` was called, until `end`.
        """
        session = self._begin(what)
        try:
            yield session
        except BaseException:
            session.close()
            raise
        if not session.kept:
            self.end(session)

    def end(self, session: Session) -> None:
        """End an operation that went well."""
        with self._lock:
            self._open.discard(session)
            if not self._closed and os.getpid() == self._pid:
                self._idle.append(session.connection)
                return
        session.close()

    def ask(self, what: str, request: Any, answer: type[T], timeout_s: float | None = None) -> T:
        """One request in a session of its own."""
        with self.session(what) as session:
            return session.ask(request, answer, timeout_s)

    def _begin(self, what: str) -> Session:
        with self._lock:
            if os.getpid() != self._pid:
                # After a fork both processes hold the sockets; this one leaves them alone.
                self._idle, self._pid = [], os.getpid()
                self._open = weakref.WeakSet()
            connection = None
            while self._idle and connection is None:
                connection = self._idle.pop()
                if _has_ended(connection):
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
            end_when_silent(connection, CLIENT_TURN_S)
            connection.sendall(self._address.token)
        except OSError as error:
            raise UnavailableError(f"{what}: the partition directory is gone: {error}") from error
        return connection

    def close(self) -> None:
        """Close the connections; operations under way in other threads raise `ClosedError`.

        Not those that go on after their block: whoever kept them ends them.
        """
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            ended = list(self._open) if os.getpid() == self._pid else []
        for connection in idle:
            connection.close()
        for session in ended:
            if not session.kept:
                session.interrupt()


class Session:
    """One operation's connection.

    Attributes:
        connection: the socket.
        kept: whether the operation goes on after the block that began it.
    """

    def __init__(self, connection: socket.socket, what: str, timeout_s: float) -> None:
        self.connection = connection
        self.kept = False
        self._what = what
        self._timeout_s = timeout_s
        self._interrupted = False

    def ask(self, request: Any, answer: type[T], timeout_s: float | None = None) -> T:
        """Send a request and wait for its answer.

        Args:
            request: one of `dataplane_tq.protocol`.
            answer: type of the answer.
            timeout_s: how long the server may take, in seconds; the link's default if None.

        Raises:
            DataPlaneError: what the server raised.
            UnavailableError: the directory is gone.
            DeadlineExceededError: it did not answer.
            InvalidRequestError: the request is too large to be sent.
            ClosedError: the link was closed meanwhile.
        """
        limit = self._timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit + _GRACE_S
        self.tell(request, min(limit, self._timeout_s))
        try:
            (length,) = HEADER.unpack(self._receive(HEADER.size, deadline))
            reply = _replies.decode(self._receive(length, deadline))
        except (OSError, EOFError) as error:
            raise self._failed(error, limit) from error
        if reply.failure is not None:
            raise reply.failure.raised()
        return _decoder_of(answer).decode(reply.answer)

    def tell(self, request: Any, timeout_s: float | None = None) -> None:
        """Send a request that has no answer; raises as `ask`."""
        limit = self._timeout_s if timeout_s is None else timeout_s
        body = _encoder.encode(request)
        if len(body) > MAX_FRAME:
            raise InvalidRequestError(
                f"{self._what}: the request to the partition directory takes {len(body)} bytes, "
                f"{MAX_FRAME} at most; ask for fewer samples at once, or give them smaller tags"
            )
        try:
            self.connection.settimeout(limit)
            expect_acknowledgement(self.connection, len(body), CLIENT_TURN_S)
            self.connection.sendall(HEADER.pack(len(body)) + body)
        except OSError as error:
            raise self._failed(error, limit) from error

    def _failed(self, error: Exception, limit: float) -> DataPlaneError:
        if self._interrupted:
            return _closed(self._what)
        # The kernel's own, because the directory's machine is silent, has a number.
        if isinstance(error, TimeoutError) and error.errno is None:
            return DeadlineExceededError(
                f"{self._what}: no answer from the partition directory after {limit:g} s"
            )
        return UnavailableError(f"{self._what}: the partition directory is gone: {error}")

    def keep(self) -> None:
        """Go on after the block; then `Link.end` or `close` it."""
        self.kept = True

    def close(self) -> None:
        """End the operation where it stands; the directory undoes what is under way."""
        self.connection.close()

    def interrupt(self) -> None:
        """The same from another thread: the operation raises `ClosedError`."""
        self._interrupted = True
        with suppress(OSError):  # it has ended by itself
            self.connection.shutdown(socket.SHUT_RDWR)

    def _receive(self, count: int, deadline: float) -> bytearray:
        data = bytearray(count)
        view = memoryview(data)
        while view:
            self.connection.settimeout(max(0.001, deadline - time.monotonic()))
            got = self.connection.recv_into(view)
            if not got:
                raise EOFError("connection closed")
            view = view[got:]
        return data


def _has_ended(idle: socket.socket) -> bool:
    """Whether the other side closed the connection, or the kernel did: nothing else arrives."""
    poll = select.poll()
    poll.register(idle, select.POLLIN)
    return bool(poll.poll(0))


def _closed(what: str) -> ClosedError:
    return ClosedError(f"{what}: the TransferQueue client was closed; build a new one")


def _decoder_of(answer: type[T]) -> msgspec.msgpack.Decoder[T]:
    found = _answers.get(answer)
    if found is None:
        # When msgspec meets a type for the first time in two threads at once, the process ends.
        with _making_decoders:
            found = _answers[answer] = msgspec.msgpack.Decoder(answer)
    return found
