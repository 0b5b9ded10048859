"""`Receiver`: an OTLP endpoint that keeps what arrives, to look at while a run goes on."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TypedDict, get_args

import structlog

from observability.receiver_forward import Forwarder
from observability.receiver_frames import (
    MOST_BYTES,
    BrokenRecording,
    FrameWriter,
    Kind,
    decode,
    read_folder,
)
from observability.receiver_http import OtlpServer
from observability.records import Records

__all__ = ["BrokenRecording", "Receiver", "ReceiverCounts", "read_folder"]

logger = structlog.get_logger("observability")


class ReceiverCounts(TypedDict):
    """Export requests so far.

    Attributes:
        received: accepted, of all three kinds; one that was sent again counts once.
        unsaved: received, but not written to the folder because the disk refused them.
        forwarded: passed on and taken.
        not_forwarded: to be passed on, but dropped.
    """

    received: int
    unsaved: int
    forwarded: int
    not_forwarded: int


class Receiver:
    """Receives OTLP over HTTP with protobuf on loopback, from when it is made until it is closed.

    A request is answered once what it tells can be seen by `snapshot` and, with a folder, has been
    handed to the operating system: it survives the end of this process, not of the machine. Spans
    and lifecycle events stay in memory until the receiver is gone; metrics go to the folder and to
    ``forward`` only. Every method may be called from any thread.

    Args:
        folder: append every request to this folder, which is made if need be; see `read_folder`.
            None keeps nothing on disk.
        host: a loopback address.
        port: 0 for a free one.
        max_body: most bytes of a request, as sent and decompressed.
        forward: base URL of a collector that gets every request too; what it does not take in time
            is dropped and counted.

    Raises:
        BlockingIOError: another process records into ``folder``.
        BrokenRecording: what is in ``folder`` already is damaged.
        OSError: the port is taken, or ``folder`` cannot be written.
        ValueError: ``host`` is not loopback, ``max_body`` more than 1 GiB, or ``forward`` no URL.
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
        if not 0 < max_body <= MOST_BYTES:
            raise ValueError(f"max_body={max_body}: expected 1 to {MOST_BYTES} bytes")
        self._arrived = threading.Condition()
        self._records = Records()
        self._seen: set[tuple[Kind, bytes]] = set()
        self._received = self._unsaved = 0
        self._saving = threading.Lock()
        self._writers: dict[Kind, FrameWriter] = {}
        self._closing = threading.Lock()
        self._closed = False
        # Bound first: what can be refused is refused before anything is made.
        self._server = OtlpServer(host, port, max_body=max_body, accept=self._accept)
        try:
            self._forwarder = Forwarder(forward) if forward is not None else None
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
                for kind in get_args(Kind):
                    self._writers[kind] = FrameWriter(folder / f"{kind}.otlp")
        except BaseException:
            self._server.server_close()
            self._close_files()
            raise
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), name="otlp-receiver", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """The port it listens on."""
        return self._server.server_port

    @property
    def endpoint(self) -> str:
        """Base URL, as OTEL_EXPORTER_OTLP_ENDPOINT wants it."""
        host = self._server.server_name
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def snapshot(self) -> Records:
        """What has arrived so far: lists of the caller's own, of records nobody changes."""
        with self._arrived:
            return self._copy()

    def wait_for(self, predicate: Callable[[Records], bool], timeout_s: float) -> Records:
        """Wait until what has arrived is enough.

        Args:
            predicate: whether it is; called when something arrives. It must not change the records
                nor call the receiver.
            timeout_s: longest wait in seconds.

        Returns:
            What has arrived by then.

        Raises:
            TimeoutError: it was not enough in time.
        """
        with self._arrived:
            if not self._arrived.wait_for(lambda: predicate(self._records), timeout_s):
                raise TimeoutError(
                    f"{len(self._records.spans)} spans and {len(self._records.events)} events came "
                    f"to {self.endpoint} within {timeout_s} s, which is not what was waited for"
                )
            return self._copy()

    def counts(self) -> ReceiverCounts:
        """What became of the requests so far."""
        forwarder = self._forwarder
        with self._arrived:
            return ReceiverCounts(
                received=self._received,
                unsaved=self._unsaved,
                forwarded=forwarder.sent if forwarder else 0,
                not_forwarded=forwarder.dropped if forwarder else 0,
            )

    def close(self, timeout_s: float = 5.0) -> None:
        """Answer what is under way, pass on what is queued, and end. May be called again.

        Args:
            timeout_s: longest wait in seconds; what is not done by then is dropped.
        """
        deadline = time.monotonic() + timeout_s
        with self._closing:
            if self._closed:
                return
            self._closed = True
            self._server.close(timeout_s)
            if self._forwarder is not None:
                self._forwarder.close(max(deadline - time.monotonic(), 0))
            self._close_files()

    def __enter__(self) -> Receiver:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _accept(self, kind: Kind, body: bytes) -> int:
        told = decode(kind, body)
        received_ns = time.time_ns()
        told.events = [replace(event, received_ns=received_ns) for event in told.events]
        if body and self._is_repeated(kind, body):
            return told.refused
        if body:
            self._save(kind, body)
            if self._forwarder is not None:
                self._forwarder.offer(kind, body)
        with self._arrived:
            self._received += 1
            self._records.add(told)
            self._arrived.notify_all()
        return told.refused

    def _is_repeated(self, kind: Kind, body: bytes) -> bool:
        """Whether the same request came before: an exporter that got no answer sends it again."""
        digest = kind, hashlib.blake2b(body, digest_size=16).digest()
        with self._arrived:
            if digest in self._seen:
                return True
            self._seen.add(digest)
        return False

    def _save(self, kind: Kind, body: bytes) -> None:
        with self._saving:
            writer = self._writers.get(kind)
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
                        goes_on="in memory",
                    )

    def _close_files(self) -> None:
        with self._saving:
            for writer in self._writers.values():
                writer.close()
            self._writers.clear()

    def _copy(self) -> Records:
        records = Records()
        records.add(self._records)
        return records
