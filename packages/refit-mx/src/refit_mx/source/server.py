"""`SourceServer`: serves bytes and digests of a publisher's versions over TCP.

Receivers that read over NIXL or shared memory also use it: they check that this is still the
process that published the version, and that the version was held until the last byte. Everyone who
can connect can read: bind it to loopback or a private network.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from refit_mx.closing import Closeable
from refit_mx.deadline import Deadline
from refit_mx.errors import ProtocolError, RefitConfigError, RefitTimeoutError
from refit_mx.listening.hosts import host_and_port, resolve_advertised_host
from refit_mx.listening.threaded import HANDSHAKE_S, Connection, ThreadedListener
from refit_mx.manifest.byte_spans import ByteSpans, check_reads, chunks
from refit_mx.manifest.digests import PublishedBlocks, digest_of_reads
from refit_mx.manifest.reads import ReadTable
from refit_mx.memory.cuda import on_separate_stream
from refit_mx.transports.source_protocol import (
    LENGTH,
    MAX_FRAME,
    MAX_HELLO_FRAME,
    MAX_READ_BYTES,
    Answer,
    Digest,
    Get,
    Hello,
    Read,
    Stored,
    decode_reads,
    decode_request,
    frame,
)
from refit_mx.transports.source_sockets import receive_frame, send_buffers

_CONNECTIONS_SHARE = 0.5
"""Fraction of this process's file descriptors that connections may use."""


@dataclass(eq=False)
class _HeldVersion:
    """Memory of a version. After each use of it, check whether the version was ``dropped``."""

    memory: torch.Tensor
    blocks: PublishedBlocks | None
    stored: dict[Stored, bytes]
    dropped: bool = False


class SourceServer(Closeable):
    """Server for a publisher's versions. It listens from its creation on, in separate threads.

    ``incarnation`` is a random id of this process, never used before. A peer has ``timeout_s`` to
    finish a request or to accept a chunk, ``handshake_timeout_s`` to send its greeting, and
    ``idle_timeout_s`` to begin its next request. For ``max_connections`` see
    `refit_mx.listening.threaded.ThreadedListener`.

    Raises:
        RefitConfigError: the server cannot listen on the address, or clients cannot connect to the
            advertised host.
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
        self._advertised_host = resolve_advertised_host(host, advertised_host)
        self.incarnation = incarnation
        self._timeout_s = timeout_s
        self._idle_timeout_s = idle_timeout_s
        self._lock = threading.Lock()
        self._held: dict[str, _HeldVersion] = {}
        self._closed = False
        try:
            self._listener = ThreadedListener(
                "source server",
                host,
                port,
                serve=self._serve,
                refusal=frame(Answer("full", "too many connections are open; try again later")),
                max_connections=max_connections,
                share=_CONNECTIONS_SHARE,
                handshake_timeout_s=handshake_timeout_s,
            )
        except OSError as error:
            bind_address = host_and_port(host, port)
            raise RefitConfigError(f"weights cannot be served on {bind_address}: {error}") from None

    @property
    def endpoint(self) -> str:
        """host:port, as in a `Manifest`."""
        return host_and_port(self._advertised_host, self._listener.port)

    @property
    def versions(self) -> tuple[str, ...]:
        """Versions that are served."""
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
        """Serve a version from now on, out of a contiguous uint8 tensor of one axis.

        The memory must not change until `drop_version` has returned. If a request for digests
        touches one of the published ``blocks`` and that block has changed, the answer is
        ``changed``; None skips this check. The encoded structure is for receivers of a brief
        manifest, the encoded manifest for receivers that are connected already.
        """
        with self._lock:
            self._held[version_id] = _HeldVersion(
                memory, blocks, {"nothing": b"", "manifest": manifest, "structure": structure}
            )

    def drop_version(self, version_id: str) -> None:
        """Stop serving a version; its memory may change once this has returned.

        Reads in progress end with the answer that the version is gone, so that receivers discard
        their bytes.
        """
        with self._lock:
            held = self._held.pop(version_id, None)
        if held is not None:
            held.dropped = True

    def close(self) -> None:
        """Stop listening and end all connections. May be called again."""
        with self._lock:
            self._closed = True
            held = list(self._held.values())
            self._held.clear()
        for version in held:
            version.dropped = True
        self._listener.close(self._timeout_s)

    def _serve(self, connection: Connection) -> None:
        sock = connection.sock
        with contextlib.suppress(OSError, RefitTimeoutError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                if self._greet(connection):
                    for data in self._frames(connection):
                        self._answer(sock, data)
            except ProtocolError as error:
                connection.warn("sent a malformed request")
                self._send(sock, Answer("refused", str(error)))

    def _frames(self, connection: Connection) -> Iterator[bytearray]:
        sock = connection.sock
        while not self._closed:
            sock.settimeout(self._idle_timeout_s)
            connection.idle_since = time.monotonic()
            if not sock.recv(1, socket.MSG_PEEK):
                return
            sock.settimeout(None)
            data = receive_frame(sock, MAX_FRAME, self._deadline())
            connection.idle_since = None
            yield data

    def _greet(self, connection: Connection) -> bool:
        hello = decode_request(receive_frame(connection.sock, MAX_HELLO_FRAME, self._deadline()))
        connection.mark_greeted()
        if not isinstance(hello, Hello):
            raise ProtocolError("a connection must begin with HELLO")
        if hello.incarnation != self.incarnation:
            answer = Answer("incarnation", "another process answers at this address")
        else:
            answer = Answer("ok")
        self._send(connection.sock, answer)
        return answer.status == "ok"

    def _answer(self, sock: socket.socket, data: bytearray) -> None:
        request = decode_request(data)
        if isinstance(request, Hello):
            raise ProtocolError("HELLO was sent twice")
        with self._lock:
            held = self._held.get(request.version_id)
        answer: Answer | None = None
        if held is not None:
            try:
                answer = self._answer_from(held, sock, request)
            except ProtocolError as error:
                answer = Answer("refused", str(error))
        # Checked after the last use of the memory: if the version was dropped before, some bytes
        # may belong to another version.
        if answer is None or (held is not None and held.dropped):
            answer = Answer(
                "gone",
                f"version {request.version_id!r} is not held; this source holds {self.versions}",
            )
        if isinstance(request, Read):
            send_buffers(sock, [memoryview(LENGTH.pack(0))], self._deadline())
        self._send(sock, answer)

    def _answer_from(
        self, held: _HeldVersion, sock: socket.socket, request: Read | Digest | Get
    ) -> Answer:
        if isinstance(request, Get):
            return Answer("ok", data=held.stored[request.what])
        reads = _checked(request.rows, held.memory)
        if isinstance(request, Read):
            self._send_chunks(sock, held, reads)
            return Answer("ok")
        with on_separate_stream(held.memory.device):
            changed = held.blocks.changed(held.memory, reads) if held.blocks is not None else None
            digests = digest_of_reads(held.memory, reads, side="source")
        if changed is not None:
            return Answer("changed", f"bytes {changed[0]} to {changed[1]} of its arena")
        return Answer("ok", data=digests)

    def _send_chunks(self, sock: socket.socket, held: _HeldVersion, reads: ReadTable) -> None:
        spans = ByteSpans(held.memory)
        for chunk in chunks(reads, "source"):
            if held.dropped:
                return
            with on_separate_stream(held.memory.device):
                buffers = spans.buffers(chunk, load=True)
            length = LENGTH.pack(chunk.nbytes)
            send_buffers(sock, [memoryview(length), *buffers], self._deadline())

    def _send(self, sock: socket.socket, answer: Answer) -> None:
        send_buffers(sock, [memoryview(frame(answer))], self._deadline())

    def _deadline(self) -> Deadline:
        return Deadline(self._timeout_s, "source server")


def _checked(rows: bytes, memory: torch.Tensor) -> ReadTable:
    """Decode and check reads from a client.

    Raises:
        ProtocolError: a read reaches outside the memory, or the reads are too many.
    """
    reads = decode_reads(rows)
    try:
        check_reads(reads, memory.numel(), "source")
    except ValueError as error:
        raise ProtocolError(str(error)) from None
    if len(reads) > 1 and reads.nbytes > MAX_READ_BYTES:
        raise ProtocolError(
            f"{len(reads)} reads of {reads.nbytes} bytes; at most {MAX_READ_BYTES} in one request"
        )
    return reads
