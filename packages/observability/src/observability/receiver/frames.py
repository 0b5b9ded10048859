"""Recordings: OTLP export requests stored in a folder and read back.

A folder holds ``traces.otlp``, ``logs.otlp`` and ``metrics.otlp``. Each file is a sequence of
frames. A frame holds one OTLP export request as its body, which is never empty:

    | length of the body: 4 bytes, little-endian | body |

A process killed during a write leaves a partial frame at the end of a file. Readers ignore it, and
the next writer truncates it.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from io import BufferedReader, FileIO, RawIOBase
from pathlib import Path
from typing import get_args

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)

from observability.records import Records, decode_logs, decode_traces
from observability.wire import OtlpSignal, parse

MAX_BYTES = 1 << 30
"""Maximum length of a body; a greater length means that the file is damaged."""

_PREFIX_BYTES = 4
"""Size of the length that precedes each body."""


class BrokenRecording(ValueError):
    """A file of a recording is damaged; a partial frame at its end is no damage."""


def decode(signal: OtlpSignal, body: bytes) -> Records:
    """Decode one export request. Metrics are only validated: they have no records.

    Raises:
        google.protobuf.message.DecodeError: ``body`` is not such a request.
    """
    if signal == "traces":
        return decode_traces(body)
    if signal == "logs":
        return decode_logs(body)
    parse(ExportMetricsServiceRequest(), body)
    return Records()


def read_folder(folder: Path) -> Records:
    """Read the recording of a process that finished, was killed or is still running.

    Raises:
        FileNotFoundError: ``folder`` has no file of a recording.
        BrokenRecording: a file is damaged; the message names it and the offset in bytes.
    """
    paths = {signal: folder / f"{signal}.otlp" for signal in get_args(OtlpSignal)}
    if not any(path.exists() for path in paths.values()):
        names = ", ".join(path.name for path in paths.values())
        raise FileNotFoundError(f"{folder}: no recording; expected {names}")
    records = Records()
    for signal, path in paths.items():
        if path.exists():
            for offset, body in frames(path):
                try:
                    records.add(decode(signal, body))
                except DecodeError as error:
                    raise BrokenRecording(
                        f"{path}: the frame at byte {offset} is not an OTLP export request of "
                        f"{signal} ({error}); the file is damaged from this byte on"
                    ) from error
    return records


def frames(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the offset in bytes and the body of each complete frame of a file.

    Raises:
        BrokenRecording: a length is 0 or more than `MAX_BYTES`.
    """
    with path.open("rb") as file:
        for offset, length in _frame_positions(path, file):
            body = file.read(length)
            if len(body) < length:  # the file was truncated during this read
                return
            yield offset, body


class FrameWriter:
    """Writer that appends frames to one file. Appended frames survive a crash of the process.

    Not thread-safe.

    Args:
        path: the file, created if absent; a partial frame at its end is truncated.

    Raises:
        BlockingIOError: another writer has the file open.
        BrokenRecording: the existing file is damaged.
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._has_partial_frame = False
        self._file = FileIO(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), "r+")
        try:
            self._lock()
            self._end = 0  # end of the last complete frame
            for offset, length in _frame_positions(path, self._file):
                self._file.seek(length, os.SEEK_CUR)
                self._end = offset + _PREFIX_BYTES + length
            self._truncate()
        except BaseException:  # even a KeyboardInterrupt must leave no file open
            self._file.close()
            raise

    def append(self, body: bytes) -> None:
        """Append one frame completely or not at all.

        Raises:
            OSError: the frame could not be written, for example because the disk is full.
        """
        frame = len(body).to_bytes(_PREFIX_BYTES, "little") + body
        written = 0
        # An earlier write failed, and the truncation after it failed too.
        if self._has_partial_frame:
            self._truncate()
        try:
            while written < len(frame):
                written += self._file.write(frame[written:]) or 0
        except OSError:
            self._has_partial_frame = True
            self._truncate()
            raise
        self._end += len(frame)

    def close(self) -> None:
        """Flush the file to disk and close it. Further calls do nothing."""
        if not self._file.closed:
            os.fsync(self._file.fileno())
            self._file.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BlockingIOError(
                f"{self.path}: another process records into this folder; choose another folder"
            ) from error

    def _truncate(self) -> None:
        self._file.truncate(self._end)
        self._file.seek(self._end)
        self._has_partial_frame = False


def _frame_positions(path: Path, file: RawIOBase | BufferedReader) -> Iterator[tuple[int, int]]:
    """Yield the offset of each complete frame and the length of its body.

    The file is then at the start of the body. The caller must read or skip the body before it takes
    the next frame.
    """
    size = os.fstat(file.fileno()).st_size
    offset = 0
    while offset + _PREFIX_BYTES <= size:
        length = int.from_bytes(file.read(_PREFIX_BYTES) or b"", "little")
        if not 0 < length <= MAX_BYTES:
            raise BrokenRecording(
                f"{path}: the frame at byte {offset} has a length of {length} bytes, expected 1 to "
                f"{MAX_BYTES}; the file is damaged from this byte on"
            )
        if offset + _PREFIX_BYTES + length > size:
            return
        yield offset, length
        offset += _PREFIX_BYTES + length
