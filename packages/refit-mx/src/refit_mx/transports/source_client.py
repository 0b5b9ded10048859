"""`SourceClient`: one connection to the server of one source."""

from __future__ import annotations

import contextlib
import ipaddress
import select
import socket
import threading
import time
from collections.abc import Iterator

from refit_mx.deadline import Deadline
from refit_mx.errors import DigestMismatchError, ProtocolError, RefitTimeoutError, SourceLostError
from refit_mx.manifest.byte_spans import ByteSpans, chunks
from refit_mx.manifest.format import DIGEST_BYTES, MAX_MANIFEST_BYTES, Manifest
from refit_mx.manifest.reads import ReadTable
from refit_mx.transports.batches import batches
from refit_mx.transports.source_protocol import (
    MAX_FRAME,
    MAX_READ_BYTES,
    MAX_READS,
    Answer,
    Digest,
    Get,
    Hello,
    Read,
    Request,
    Stored,
    decode_answer,
    encode_reads,
    frame,
)
from refit_mx.transports.source_sockets import (
    connect,
    receive_buffers,
    receive_frame,
    receive_length,
    send_buffers,
)

_FULL_PAUSE_S = 0.1
"""Pause before the next attempt to connect to a source that has no free connection."""


class SourceClient:
    """Client that connects on first use, and again after the server closed an idle connection.

    One thread at a time may use it, but any thread may call `abort`. Connecting and greeting
    together may take ``connect_timeout_s``. Every method raises

    - `SourceLostError` with the source's worker: the source cannot be reached, is not the process
        in the manifest, or does not hold the version;
    - `RefitTimeoutError`: the deadline passed;
    - `ProtocolError`: the source sent what the protocol does not allow, or refused a request.
    """

    def __init__(self, source: Manifest, *, connect_timeout_s: float = 5.0) -> None:
        self._source = source
        self._connect_timeout_s = connect_timeout_s
        self._sock: socket.socket | None = None
        self._lock = threading.Lock()
        self._aborted = False

    @property
    def connected(self) -> bool:
        """True while it has a connection that the server has not closed."""
        if self._sock is None:
            return False
        # Between requests nothing arrives but the end of the connection. Not `select`: it fails for
        # descriptors from 1,024 on.
        readable = select.poll()
        readable.register(self._sock, select.POLLIN)
        return not readable.poll(0)

    @property
    def local(self) -> bool:
        """True if it is connected to an address of this machine."""
        if self._sock is None:
            return False
        try:
            here, there = self._sock.getsockname()[0], self._sock.getpeername()[0]
        except OSError:  # the connection ended
            return False
        # The kernel connects to a local address from that same address.
        return bool(here == there) or ipaddress.ip_address(there).is_loopback

    def connect(self, deadline: Deadline) -> bool:
        """Connect, unless connected already; return whether it had to connect."""
        if self.connected:
            return False
        self._drop()
        while True:
            with self._errors(deadline, "connecting"):
                limit = Deadline(min(deadline.check(), self._connect_timeout_s), "connecting")
                try:
                    answer = self.greet(limit)
                except (RefitTimeoutError, TimeoutError):
                    deadline.check("connecting")
                    raise self._lost(f"did not answer for {self._connect_timeout_s:g} s") from None
                if answer.status != "full":
                    self._check_ok(answer)
                    return True
            # The source is healthy, and has capacity once another receiver is done.
            self._drop()
            if deadline.left_s <= _FULL_PAUSE_S:
                raise deadline.error(f"source {self._source_text()} is full: {answer.message}")
            time.sleep(_FULL_PAUSE_S)

    def read(
        self, reads: ReadTable, spans: ByteSpans, *, version_id: str, deadline: Deadline
    ) -> None:
        """Read into a scratch buffer, with one request.

        The reads are at most `MAX_READS` rows and `MAX_READ_BYTES` bytes, or one row of any size.
        The source must hold the version until the last byte.
        """
        self.connect(deadline)
        with self._errors(deadline, "reading"):
            sock = self._send(Read(version_id, encode_reads(reads)), deadline)
            for chunk in chunks(reads, "scratch"):
                expected = chunk.nbytes
                announced = receive_length(sock, expected, deadline)
                if not announced:
                    break  # the answer has the reason
                if announced != expected:
                    raise ProtocolError(f"a chunk of {announced} bytes; expected {expected}")
                receive_buffers(sock, spans.buffers(chunk, load=False), deadline)
                spans.store(chunk)
            else:
                receive_length(sock, 0, deadline)
                self._check_ok(self._receive(deadline))
                return
            self._check_ok(self._receive(deadline))
            raise ProtocolError("the source ended its chunks early but reported no error")

    def digests(self, reads: ReadTable, *, version_id: str, deadline: Deadline) -> bytes:
        """Request `DIGEST_BYTES` per read, as from `refit_mx.manifest.digests.digest_of_reads`.

        Raises:
            DigestMismatchError: the source's memory differs from what it published.
        """
        digests = bytearray()
        for batch in batches(reads, max_bytes=MAX_READ_BYTES, max_reads=MAX_READS):
            part = batch.rows_of(reads)
            request = Digest(version_id, encode_reads(part))
            data = self._request(request, deadline, "asking for digests")
            if len(data) != len(part) * DIGEST_BYTES:
                self._drop()
                raise ProtocolError(f"{len(data)} bytes of digests for {len(part)} reads")
            digests += data
        return bytes(digests)

    def get(self, what: Stored, *, version_id: str, deadline: Deadline) -> bytes:
        """Request the encoded manifest or structure of a version."""
        max_bytes = MAX_MANIFEST_BYTES + MAX_FRAME
        return self._request(Get(version_id, what), deadline, f"asking for the {what}", max_bytes)

    def check_held(self, *, version_id: str, deadline: Deadline) -> None:
        """Raise `SourceLostError` unless the source holds the version."""
        self._request(Get(version_id), deadline, "asking for the version")

    def abort(self) -> None:
        """End a call in another thread at once; it raises `SourceLostError`."""
        with self._lock:
            self._aborted = True
            if self._sock is not None:
                with contextlib.suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Disconnect. May be called again; the next use reconnects."""
        self._drop()

    def greet(self, deadline: Deadline) -> Answer:
        """Connect, and return the server's answer to HELLO.

        Raises:
            OSError: the source cannot be reached, or not in time.
            ProtocolError: the server is no source server, or the endpoint is no address.
        """
        host, _, port = self._source.endpoint.rpartition(":")
        try:
            number = int(port)
        except ValueError:
            raise ProtocolError(f"endpoint {self._source.endpoint!r}; expected host:port") from None
        sock = connect(host.strip("[]"), number, deadline)
        try:
            sock.settimeout(None)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                if self._aborted:
                    raise ConnectionError("aborted")
                self._sock = sock
            return self._answer(Hello(self._source.incarnation), deadline)
        except BaseException:  # close it also on an interrupt
            sock.close()
            self._sock = None
            raise

    def _request(
        self, request: Request, deadline: Deadline, doing: str, max_bytes: int = MAX_FRAME
    ) -> bytes:
        self.connect(deadline)
        with self._errors(deadline, doing):
            return self._check_ok(self._answer(request, deadline, max_bytes)).data

    def _send(self, request: Request, deadline: Deadline) -> socket.socket:
        assert self._sock is not None
        send_buffers(self._sock, [memoryview(frame(request))], deadline)
        return self._sock

    def _receive(self, deadline: Deadline, max_bytes: int = MAX_FRAME) -> Answer:
        assert self._sock is not None
        return decode_answer(receive_frame(self._sock, max_bytes, deadline))

    def _answer(self, request: Request, deadline: Deadline, max_bytes: int = MAX_FRAME) -> Answer:
        self._send(request, deadline)
        return self._receive(deadline, max_bytes)

    def _check_ok(self, answer: Answer) -> Answer:
        if answer.status == "ok":
            return answer
        if answer.status == "refused":
            raise ProtocolError(f"source {self._source_text()} refused: {answer.message}")
        if answer.status == "changed":
            raise DigestMismatchError(
                f"the memory of source {self._source_text()} differs from what it published as "
                f"{self._source.version_id}: {answer.message}",
                (self._source.worker_id,),
            )
        raise self._lost(f"answered {answer.status!r}: {answer.message}")

    @contextlib.contextmanager
    def _errors(self, deadline: Deadline, doing: str) -> Iterator[None]:
        try:
            yield
        except (SourceLostError, ProtocolError):
            self._drop()
            raise
        except (RefitTimeoutError, TimeoutError):
            self._drop()
            raise deadline.error(f"{doing}, source {self._source_text()}") from None
        except OSError as error:
            self._drop()
            raise self._lost(f"lost while {doing}: {error}") from None
        except BaseException:  # an interrupt leaves a connection in the middle of an answer
            self._drop()
            raise

    def _lost(self, why: str) -> SourceLostError:
        return SourceLostError(f"source {self._source_text()} {why}", (self._source.worker_id,))

    def _source_text(self) -> str:
        return f"{self._source.worker_id!r} at {self._source.endpoint}"

    def _drop(self) -> None:
        with self._lock:
            if self._sock is not None:
                self._sock.close()
                self._sock = None


def is_gone(source: Manifest, timeout_s: float) -> bool:
    """Return whether the process of a manifest is known to have stopped.

    It has stopped if its address refuses connections, or another process answers there. A suspended
    process still accepts connections, and an unreachable one may return, so these do not count as
    gone.
    """
    client = SourceClient(source)
    try:
        answer = client.greet(Deadline(timeout_s, "asking whether a source is gone"))
    except ConnectionRefusedError:
        return True
    except (OSError, ProtocolError):
        return False
    finally:
        client.close()
    return answer.status == "incarnation"
