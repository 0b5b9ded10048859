"""`SourceClient`: one connection to one source's server."""

from __future__ import annotations

import contextlib
import ipaddress
import select
import socket
import threading
import time
from collections.abc import Iterator

from refit_mx.byte_spans import ByteSpans, chunks
from refit_mx.deadline import Deadline
from refit_mx.errors import (
    DigestMismatchError,
    ProtocolError,
    RefitTimeoutError,
    SourceLostError,
)
from refit_mx.manifest import DIGEST_BYTES, Manifest
from refit_mx.reads import ReadTable
from refit_mx.source_protocol import (
    MOST_FRAME,
    MOST_READ_BYTES,
    MOST_READS,
    Answer,
    Describe,
    Digest,
    Hello,
    Ping,
    Read,
    Request,
    Tell,
    decode_answer,
    encode_reads,
    frame,
)
from refit_mx.source_sockets import (
    connect,
    receive_buffers,
    receive_frame,
    receive_length,
    send_buffers,
)
from refit_mx.transports.batches import batches

_FULL_PAUSE_S = 0.1
"""Before a source that has as many connections as it takes is asked again."""


class SourceClient:
    """Connects when it is first used, and again after the server closed an idle connection.

    One thread at a time may use it, but `abort` may come from any. Every method raises

    - `SourceLostError`, naming the source's worker: it cannot be reached, it is another process
      than the one of the manifest, or it does not hold the version (any more);
    - `RefitTimeoutError`: the deadline passed;
    - `ProtocolError`: it sent what it must not, or refused what it was sent.

    Args:
        source: its manifest.
        connect_timeout_s: for connecting and being greeted.
    """

    def __init__(self, source: Manifest, *, connect_timeout_s: float = 5.0) -> None:
        self._source = source
        self._connect_timeout_s = connect_timeout_s
        self._sock: socket.socket | None = None
        self._lock = threading.Lock()
        self._aborted = False

    @property
    def connected(self) -> bool:
        """Whether it has a connection that the server has not closed."""
        if self._sock is None:
            return False
        # Between requests there is nothing to read, so what can be read is the end. Not `select`,
        # which takes no descriptor from 1,024 on.
        readable = select.poll()
        readable.register(self._sock, select.POLLIN)
        return not readable.poll(0)

    @property
    def local(self) -> bool:
        """Whether it is connected, and to an address of this machine."""
        if self._sock is None:
            return False
        try:
            here, there = self._sock.getsockname()[0], self._sock.getpeername()[0]
        except OSError:  # the connection ended
            return False
        # To an address of its own the kernel connects from the same one.
        return bool(here == there) or ipaddress.ip_address(there).is_loopback

    def connect(self, deadline: Deadline) -> bool:
        """Connect, unless it is connected.

        Returns:
            Whether it had to.
        """
        if self.connected:
            return False
        self._drop()
        while True:
            with self._errors(deadline, "connecting"):
                limit = Deadline(min(deadline.check(), self._connect_timeout_s), "connecting")
                try:
                    answer = self.greeting(limit)
                except (RefitTimeoutError, TimeoutError):
                    deadline.check("connecting")
                    raise self._lost(f"did not answer for {self._connect_timeout_s:g} s") from None
                if answer.status != "full":
                    self._ok(answer)
                    return True
            # It is well, and has a place once another receiver is done.
            self._drop()
            if deadline.left_s <= _FULL_PAUSE_S:
                raise deadline.error(f"source {self._named()} is full: {answer.message}")
            time.sleep(_FULL_PAUSE_S)

    def read(
        self, reads: ReadTable, spans: ByteSpans, *, version_id: str, deadline: Deadline
    ) -> None:
        """Read into a scratch. The table must fit one request; see `refit_mx.transports.batches`.

        Args:
            reads: at most `MOST_READS` rows and `MOST_READ_BYTES` bytes, or one row.
            spans: of the scratch.
            version_id: that must be held to the last byte.
            deadline: for all of it.
        """
        self.connect(deadline)
        with self._errors(deadline, "reading"):
            sock = self._send(Read(version_id, encode_reads(reads)), deadline)
            for chunk in chunks(reads, "scratch"):
                expected = chunk.nbytes
                announced = receive_length(sock, expected, deadline)
                if not announced:
                    break  # the answer says why
                if announced != expected:
                    raise ProtocolError(f"a chunk of {announced} bytes; expected {expected}")
                receive_buffers(sock, spans.buffers(chunk, load=False), deadline)
                spans.store(chunk)
            else:
                receive_length(sock, 0, deadline)
                self._ok(self._receive(deadline))
                return
            self._ok(self._receive(deadline))
            raise ProtocolError("the bytes ended before the last one")

    def digests(self, reads: ReadTable, *, version_id: str, deadline: Deadline) -> bytes:
        """The source's digests of reads: compare with `refit_mx.digests.digest_of_reads`.

        Args:
            reads: any number.
            version_id: that must be held while the digests are taken.
            deadline: for all of it.

        Returns:
            `DIGEST_BYTES` a row.

        Raises:
            DigestMismatchError: the source's memory is not as it was published.
        """
        found = bytearray()
        for batch in batches(reads, most_bytes=MOST_READ_BYTES, most_reads=MOST_READS):
            part = batch.of(reads)
            self.connect(deadline)
            with self._errors(deadline, "asking for digests"):
                data = self._ok(self._answer(Digest(version_id, encode_reads(part)), deadline)).data
                if len(data) != len(part) * DIGEST_BYTES:
                    raise ProtocolError(f"{len(data)} bytes of digests for {len(part)} reads")
                found += data
        return bytes(found)

    def structure(self, *, version_id: str, most_bytes: int, deadline: Deadline) -> bytes:
        """The source's `refit_mx.manifest.Structure` of a version, encoded.

        Args:
            version_id: that it must hold.
            most_bytes: that are taken; more is a `ProtocolError`.
            deadline: for all of it.
        """
        self.connect(deadline)
        with self._errors(deadline, "asking for the structure"):
            request = Describe(version_id)
            return self._ok(self._answer(request, deadline, most_bytes + MOST_FRAME)).data

    def manifest(self, *, version_id: str, most_bytes: int, deadline: Deadline) -> bytes:
        """The source's manifest of a version, encoded. Arguments as of `structure`."""
        self.connect(deadline)
        with self._errors(deadline, "asking for the manifest"):
            return self._ok(self._answer(Tell(version_id), deadline, most_bytes + MOST_FRAME)).data

    def check_held(self, *, version_id: str, deadline: Deadline) -> None:
        """Raise `SourceLostError` unless the source holds the version."""
        self.connect(deadline)
        with self._errors(deadline, "asking for the version"):
            self._ok(self._answer(Ping(version_id), deadline))

    def abort(self) -> None:
        """End what another thread is doing with it, at once; that thread gets `SourceLostError`."""
        with self._lock:
            self._aborted = True
            if self._sock is not None:
                with contextlib.suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Disconnect. May be called again; the next use connects anew."""
        self._drop()

    def greeting(self, deadline: Deadline) -> Answer:
        """Connect, and say what the server answers to HELLO.

        Raises:
            OSError: it cannot be reached, or not in time.
            ProtocolError: what answers is no source server, or the endpoint is no address.
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
            self._adopt(sock)
            return self._answer(Hello(self._source.incarnation), deadline)
        except BaseException:
            sock.close()
            self._sock = None
            raise

    def _adopt(self, sock: socket.socket) -> None:
        with self._lock:
            if self._aborted:
                raise ConnectionError("aborted")
            self._sock = sock

    def _send(self, request: Request, deadline: Deadline) -> socket.socket:
        assert self._sock is not None
        send_buffers(self._sock, [memoryview(frame(request))], deadline)
        return self._sock

    def _receive(self, deadline: Deadline, most_bytes: int = MOST_FRAME) -> Answer:
        assert self._sock is not None
        return decode_answer(receive_frame(self._sock, most_bytes, deadline))

    def _answer(self, request: Request, deadline: Deadline, most_bytes: int = MOST_FRAME) -> Answer:
        self._send(request, deadline)
        return self._receive(deadline, most_bytes)

    def _ok(self, answer: Answer) -> Answer:
        if answer.status == "ok":
            return answer
        if answer.status == "refused":
            raise ProtocolError(f"source {self._named()} refused: {answer.message}")
        if answer.status == "changed":
            raise DigestMismatchError(
                f"source {self._named()} holds {self._source.version_id} not as it published it: "
                f"{answer.message}",
                (self._source.worker_id,),
            )
        raise self._lost(f"says {answer.status}: {answer.message}")

    @contextlib.contextmanager
    def _errors(self, deadline: Deadline, doing: str) -> Iterator[None]:
        try:
            yield
        except (SourceLostError, ProtocolError):
            self._drop()
            raise
        except (RefitTimeoutError, TimeoutError):
            self._drop()
            raise deadline.error(f"{doing}, source {self._named()}") from None
        except OSError as error:
            self._drop()
            raise self._lost(f"lost while {doing}: {error}") from None
        except BaseException:
            self._drop()
            raise

    def _lost(self, why: str) -> SourceLostError:
        return SourceLostError(f"source {self._named()} {why}", (self._source.worker_id,))

    def _named(self) -> str:
        return f"{self._source.worker_id!r} at {self._source.endpoint}"

    def _drop(self) -> None:
        with self._lock:
            if self._sock is not None:
                self._sock.close()
                self._sock = None


def is_gone(source: Manifest, timeout_s: float) -> bool:
    """Whether the process of a manifest is known to have ended.

    That is if its address refuses connections, or another process answers there. A process that
    was stopped still takes connections, and one that cannot be reached may come back: both are not
    gone.
    """
    client = SourceClient(source)
    try:
        answer = client.greeting(Deadline(timeout_s, "asking whether a source is gone"))
    except ConnectionRefusedError:
        return True
    except (OSError, ProtocolError):
        return False
    finally:
        client.close()
    return answer.status == "incarnation"
