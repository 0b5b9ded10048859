"""`Receiver`: an OTLP endpoint whose records can be read while a run sends them."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypedDict, get_args

import structlog

from observability.receiver.forward import Forwarder
from observability.receiver.frames import MAX_BYTES, FrameWriter, decode
from observability.receiver.http import OtlpServer
from observability.records import Records
from observability.wire import OtlpSignal

logger = structlog.get_logger("observability")


class ReceiverCounts(TypedDict):
    """Numbers of export requests so far.

    Attributes:
        received: accepted requests of all signals; a repeated request counts once.
        unsaved: received requests that could not be written to the folder.
        forwarded: received requests that the collector accepted.
        not_forwarded: received requests that were dropped: the collector did not accept them, the
            queue was full, or the receiver was closed first.
    """

    received: int
    unsaved: int
    forwarded: int
    not_forwarded: int


class Receiver:
    """An endpoint for OTLP over HTTP with protobuf on loopback. It listens until it is closed.

    The response is sent after `snapshot` includes the request's records. With a folder, the request
    is written before the response; if that fails, it counts as ``unsaved``. Written requests
    survive a crash of this process, but not of the machine. Spans and lifecycle events stay in
    memory as long as the receiver exists. Metrics are only written to the folder and forwarded.
    Every method may be called from any thread.

    Args:
        folder: folder to which every request is appended, created if absent; see `read_folder`.
            None stores nothing on disk.
        host: a loopback address.
        port: port to listen on; 0 selects a free one.
        max_body: maximum size of a request in bytes, before and after decompression.
        forward: base URL of a collector to which every request is forwarded. A request is dropped
            and counted if the collector does not accept it in time or the queue is full.

    Raises:
        BlockingIOError: another receiver records into ``folder``.
        BrokenRecording: the recording in ``folder`` is damaged.
        OSError: the port is in use, or ``folder`` cannot be written.
        ValueError: ``host`` is not loopback, ``max_body`` is more than 1 GiB, or ``forward`` is not
            a URL.
    """

    def __init__(
        self,
        folder: Path | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        max_body: int = 64 << 20,
        forward: str | None = None,
    ) -> None:
        if not 0 < max_body <= MAX_BYTES:
            raise ValueError(f"max_body={max_body}: expected 1 to {MAX_BYTES} bytes")
        self._records_added = threading.Condition()
        self._records = Records()
        # Signal and digest of each body received so far, to recognize repeated requests.
        self._digests: set[tuple[OtlpSignal, bytes]] = set()
        self._received = self._unsaved = 0
        self._writers_lock = threading.Lock()
        self._writers: dict[OtlpSignal, FrameWriter] = {}
        self._close_lock = threading.Lock()
        self._closed = False
        # Bind first: no file may be created if the host is invalid or the port in use.
        self._server = OtlpServer(host, port, max_body=max_body, accept=self._accept)
        self._forwarder: Forwarder | None = None
        try:
            if forward is not None:
                self._forwarder = Forwarder(forward)
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
                for signal in get_args(OtlpSignal):
                    self._writers[signal] = FrameWriter(folder / f"{signal}.otlp")
        except BaseException:  # even after KeyboardInterrupt, leave no port, file or thread open
            self._server.server_close()
            self._close_files()
            if self._forwarder is not None:
                self._forwarder.close(1.0)  # nothing is queued
            raise
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), name="otlp-receiver", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """The port that the receiver listens on."""
        return self._server.server_port

    @property
    def endpoint(self) -> str:
        """Base URL for OTEL_EXPORTER_OTLP_ENDPOINT."""
        host = self._server.server_name
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def snapshot(self) -> Records:
        """Return the records received so far, in new lists."""
        with self._records_added:
            return self._copy()

    def wait_for(self, predicate: Callable[[Records], bool], timeout_s: float) -> Records:
        """Wait until the received records satisfy a predicate.

        Args:
            predicate: function of the records, called now and after each request. It must not
                change the records or call the receiver.
            timeout_s: maximum wait in seconds.

        Returns:
            The records received by then, in new lists.

        Raises:
            TimeoutError: the predicate was not satisfied in time.
        """
        with self._records_added:
            if not self._records_added.wait_for(lambda: predicate(self._records), timeout_s):
                raise TimeoutError(
                    f"the records of {self.endpoint} did not satisfy the predicate within "
                    f"{timeout_s} s; spans received: {len(self._records.spans)}, events received: "
                    f"{len(self._records.events)}"
                )
            return self._copy()

    def counts(self) -> ReceiverCounts:
        """Return the numbers of requests so far, by outcome."""
        forwarder = self._forwarder
        with self._records_added:
            return ReceiverCounts(
                received=self._received,
                unsaved=self._unsaved,
                forwarded=forwarder.sent if forwarder else 0,
                not_forwarded=forwarder.dropped if forwarder else 0,
            )

    def close(self, timeout_s: float = 5.0) -> None:
        """Answer running requests, forward queued ones, and stop. Further calls do nothing.

        Args:
            timeout_s: maximum wait in seconds. Requests that are still queued then are dropped.
        """
        deadline = time.monotonic() + timeout_s
        with self._close_lock:
            if self._closed:
                return
            self._closed = True
            self._server.close(timeout_s)
            if self._forwarder is not None:
                self._forwarder.close(max(deadline - time.monotonic(), 0))
            self._close_files()

    def __enter__(self) -> Receiver:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _accept(self, signal: OtlpSignal, body: bytes) -> int:
        """Store the records of a request; return the number of rejected spans."""
        records = decode(signal, body)
        received_ns = time.time_ns()
        records.events = [replace(event, received_ns=received_ns) for event in records.events]
        # An exporter repeats a request if it gets no response in time. The lock delays the response
        # to the repetition until the first copy is written.
        with self._writers_lock:
            if body and self._is_repeated(signal, body):
                return records.rejected_spans
            if body:
                self._save(signal, body)
                if self._forwarder is not None:
                    self._forwarder.enqueue(signal, body)
            with self._records_added:
                self._received += 1
                self._records.add(records)
                self._records_added.notify_all()
        return records.rejected_spans

    def _is_repeated(self, signal: OtlpSignal, body: bytes) -> bool:
        """Return whether a request was received before; remember it if not."""
        digest = signal, hashlib.blake2b(body, digest_size=16).digest()
        if digest in self._digests:
            return True
        self._digests.add(digest)
        return False

    def _save(self, signal: OtlpSignal, body: bytes) -> None:
        writer = self._writers.get(signal)
        if writer is None:
            return
        try:
            writer.append(body)
        except OSError as error:
            self._unsaved += 1
            if self._unsaved == 1:
                logger.warning(
                    "recording_failed",
                    path=str(writer.path),
                    reason=str(error),
                    consequence="requests that are not written are missing from the recording",
                )

    def _close_files(self) -> None:
        with self._writers_lock:
            for writer in self._writers.values():
                writer.close()
            self._writers.clear()

    def _copy(self) -> Records:
        records = Records()
        records.add(self._records)
        return records
