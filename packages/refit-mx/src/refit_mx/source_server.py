"""`SourceServer`: serves bytes and digests of the versions that a publisher holds, over TCP.

Beside NIXL it is what tells a receiver that a version was held to the last byte, and that this
process is still the one that published it. Whoever can connect can read: bind it to loopback or to
a private network.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import torch

from refit_mx.byte_spans import ByteSpans, check_reads, chunks
from refit_mx.cuda_order import beside_others
from refit_mx.deadline import Deadline
from refit_mx.digests import digest_of_reads
from refit_mx.errors import ProtocolError, RefitConfigError, RefitTimeoutError
from refit_mx.hosts import host_and_port, told_host
from refit_mx.published_blocks import PublishedBlocks
from refit_mx.reads import ReadTable
from refit_mx.source_protocol import (
    LENGTH,
    MOST_FRAME,
    MOST_HELLO_FRAME,
    MOST_READ_BYTES,
    Answer,
    Describe,
    Digest,
    Hello,
    Ping,
    Read,
    Tell,
    decode_reads,
    decode_request,
    frame,
)
from refit_mx.source_sockets import receive_frame, send_buffers
from refit_mx.threaded_listener import HANDSHAKE_S, Connection, ThreadedListener

_SHARE = 0.5
"""Of this process's file descriptors that connections may take."""


class _Held:
    """A version's memory, and whether it was dropped: checked after every use of the memory."""

    def __init__(
        self,
        memory: torch.Tensor,
        blocks: PublishedBlocks | None,
        structure: bytes,
        manifest: bytes,
    ) -> None:
        self.memory = memory
        self.blocks = blocks
        self.structure = structure
        self.manifest = manifest
        self.dropped = False


def _told(held: _Held, request: Ping | Describe | Tell) -> bytes:
    if isinstance(request, Ping):
        return b""
    return held.structure if isinstance(request, Describe) else held.manifest


class SourceServer:
    """Listens from its creation on; threads of its own serve the connections.

    Args:
        host: to bind; loopback unless the network is private.
        advertised_host: that others are told; None for ``host``.
        port: 0 takes a free one.
        incarnation: of this process: random, never used before.
        timeout_s: for a peer to send a request it has begun, or to take a chunk.
        handshake_timeout_s: for a peer to send its greeting.
        idle_timeout_s: for a peer to send its next request.
        max_connections: at a time, and no more than half of the file descriptors that this process
            may open. For a further one the oldest without a greeting is closed, else the one
            without a request for longest, if for a second; else it is told so, and closed.

    Raises:
        RefitConfigError: an empty incarnation, the address cannot be listened on, or nobody could
            connect to what is told.
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        advertised_host: str | None = None,
        port: int = 0,
        incarnation: str,
        timeout_s: float = 30.0,
        handshake_timeout_s: float = HANDSHAKE_S,
        idle_timeout_s: float = 600.0,
        max_connections: int = 1024,
    ) -> None:
        if not incarnation:
            raise RefitConfigError("SourceServer: the incarnation is empty; expected a random one")
        self._told_host = told_host(host, advertised_host)
        self._incarnation = incarnation
        self._timeout_s = timeout_s
        self._idle_timeout_s = idle_timeout_s
        self._lock = threading.Lock()
        self._held: dict[str, _Held] = {}
        self._closed = False
        try:
            self._listener = ThreadedListener(
                "source server",
                host,
                port,
                serve=self._serve,
                refusal=frame(Answer("full", "too many connections are open; try again later")),
                max_connections=max_connections,
                share=_SHARE,
                handshake_timeout_s=handshake_timeout_s,
            )
        except OSError as error:
            where = host_and_port(host, port)
            raise RefitConfigError(f"weights cannot be served on {where}: {error}") from None

    @property
    def endpoint(self) -> str:
        """host:port, as a `Manifest` names it."""
        return host_and_port(self._told_host, self._listener.port)

    @property
    def incarnation(self) -> str:
        """Of this process."""
        return self._incarnation

    @property
    def versions(self) -> tuple[str, ...]:
        """That are served."""
        with self._lock:
            return tuple(self._held)

    def serve_version(
        self,
        version_id: str,
        memory: torch.Tensor,
        blocks: PublishedBlocks | None = None,
        *,
        structure: bytes = b"",
        manifest: bytes = b"",
    ) -> None:
        """Serve a version from now on.

        Args:
            version_id: of the control plane.
            memory: the part of the arena that it fills: one contiguous uint8 tensor of one axis. It
                must not change until `drop_version` has returned.
            blocks: as they were published: no digest is given of one that has changed since. None
                gives digests of the memory as it is.
            structure: of its manifest, encoded, for those who got that in brief.
            manifest: encoded, for those who know this server already.

        Raises:
            RefitConfigError: the version is served already, or the memory is of another kind.
        """
        ByteSpans(memory)  # refuses other kinds
        with self._lock:
            if version_id in self._held:
                raise RefitConfigError(f"version {version_id!r} is served already")
            self._held[version_id] = _Held(memory, blocks, structure, manifest)

    def drop_version(self, version_id: str) -> bool:
        """Stop serving a version; its memory may change once this has returned.

        Reads that are under way end with the answer that the version is gone, so that what they
        sent is thrown away.

        Returns:
            Whether it was served.
        """
        with self._lock:
            held = self._held.pop(version_id, None)
        if held is not None:
            held.dropped = True
        return held is not None

    def close(self) -> None:
        """Stop listening and break all connections. May be called again."""
        with self._lock:
            self._closed = True
            held = list(self._held.values())
            self._held.clear()
        for version in held:
            version.dropped = True
        self._listener.close(self._timeout_s)

    def __enter__(self) -> SourceServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self, served: Connection) -> None:
        connection = served.sock
        with contextlib.suppress(OSError, RefitTimeoutError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                if self._greet(served):
                    for data in self._frames(served):
                        self._answer(connection, data)
            except ProtocolError as error:
                served.warn("sent a malformed request")
                self._send(connection, Answer("refused", str(error)))

    def _frames(self, served: Connection) -> Iterator[bytearray]:
        connection = served.sock
        while not self._closed:
            connection.settimeout(self._idle_timeout_s)
            served.idle_since = time.monotonic()
            if not connection.recv(1, socket.MSG_PEEK):
                return
            connection.settimeout(None)
            data = receive_frame(connection, MOST_FRAME, self._deadline())
            served.idle_since = None
            yield data

    def _greet(self, served: Connection) -> bool:
        connection = served.sock
        hello = decode_request(receive_frame(connection, MOST_HELLO_FRAME, self._deadline()))
        served.greeted()
        if not isinstance(hello, Hello):
            raise ProtocolError("a connection has to begin with HELLO")
        if hello.incarnation != self._incarnation:
            answer = Answer("incarnation", "this is another process than the one expected")
        else:
            answer = Answer("ok")
        self._send(connection, answer)
        return answer.status == "ok"

    def _answer(self, connection: socket.socket, data: bytearray) -> None:
        request = decode_request(data)
        if isinstance(request, Read):
            answer = self._read(connection, request)
        elif isinstance(request, Digest):
            answer = self._digest(request)
        elif isinstance(request, Ping | Describe | Tell):
            held = self._version(request.version_id)
            if held is None:
                answer = self._gone(request.version_id)
            else:
                answer = Answer("ok", data=_told(held, request))
        else:
            raise ProtocolError("HELLO came twice")
        self._send(connection, answer)

    def _read(self, connection: socket.socket, request: Read) -> Answer:
        answer = Answer("ok")
        held = self._version(request.version_id)
        if held is None:
            answer = self._gone(request.version_id)
        else:
            try:
                reads = _checked(request.rows, held.memory)
            except ProtocolError as error:
                answer = Answer("refused", str(error))
            else:
                self._send_chunks(connection, held, reads)
                # Asked after the last byte was taken from the memory: had the version been dropped
                # before that, bytes of another one could have been among them.
                if held.dropped:
                    answer = self._gone(request.version_id)
        send_buffers(connection, [memoryview(LENGTH.pack(0))], self._deadline())
        return answer

    def _send_chunks(self, connection: socket.socket, held: _Held, reads: ReadTable) -> None:
        spans = ByteSpans(held.memory)
        for chunk in chunks(reads, "source"):
            if held.dropped:
                return
            with beside_others(held.memory.device):
                buffers = spans.buffers(chunk, load=True)
            length = LENGTH.pack(chunk.nbytes)
            send_buffers(connection, [memoryview(length), *buffers], self._deadline())

    def _digest(self, request: Digest) -> Answer:
        held = self._version(request.version_id)
        if held is None:
            return self._gone(request.version_id)
        try:
            reads = _checked(request.rows, held.memory)
        except ProtocolError as error:
            return Answer("refused", str(error))
        with beside_others(held.memory.device):
            changed = held.blocks.changed(held.memory, reads) if held.blocks is not None else None
            digests = digest_of_reads(held.memory, reads, side="source")
        # Before what was found is believed: a dropped version's memory may be filled with another.
        if held.dropped:
            return self._gone(request.version_id)
        if changed is not None:
            return Answer("changed", f"bytes {changed[0]} to {changed[1]} of its arena")
        return Answer("ok", data=digests)

    def _version(self, version_id: str) -> _Held | None:
        with self._lock:
            return self._held.get(version_id)

    def _gone(self, version_id: str) -> Answer:
        return Answer("gone", f"version {version_id!r} is not held; held are {self.versions}")

    def _send(self, connection: socket.socket, answer: Answer) -> None:
        send_buffers(connection, [memoryview(frame(answer))], self._deadline())

    def _deadline(self) -> Deadline:
        return Deadline(self._timeout_s, "source server")


def _checked(rows: bytes, memory: torch.Tensor) -> ReadTable:
    """Reads that a client sent.

    Raises:
        ProtocolError: they reach outside the memory, or are too many.
    """
    reads = decode_reads(rows)
    try:
        check_reads(reads, memory.numel(), "source")
    except ValueError as error:
        raise ProtocolError(str(error)) from None
    if len(reads) > 1 and reads.nbytes > MOST_READ_BYTES:
        raise ProtocolError(
            f"{len(reads)} reads of {reads.nbytes} bytes; at most {MOST_READ_BYTES} in one request"
        )
    return reads
