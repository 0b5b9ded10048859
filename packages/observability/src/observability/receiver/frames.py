"""Recordings: OTLP export requests stored in a folder and read back.

A folder holds ``traces.otlp``, ``logs.otlp`` and ``metrics.otlp``. Each is a sequence of frames:
the length of a body in 4 bytes, little-endian, then the body, the bytes of one OTLP export request.
A frame is never empty. A process killed during a write leaves a partial frame at the end; readers
ignore it and the next writer truncates it.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator
from io import BufferedReader, FileIO, RawIOBase
from pathlib import Path
from typing import get_args

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)

from observability.records import Records, decode_logs, decode_traces
from observability.wire import Kind, parse

MAX_BYTES = 1 << 30
"""Maximum length of a frame; a greater length means that the file is damaged."""

_PREFIX = 4


class BrokenRecording(ValueError):
    """A file of a recording is damaged before its end."""


def decode(kind: Kind, body: bytes) -> Records:
    """Decode one export request; metrics are only validated and yield no records.

    Raises:
        google.protobuf.message.DecodeError: ``body`` is not such a request.
    """
    if kind == "traces":
        return decode_traces(body)
    if kind == "logs":
        return decode_logs(body)
    parse(ExportMetricsServiceRequest(), body)
    return Records()


def read_folder(folder: Path) -> Records:
    """Read the recording of a process that finished, was killed or is still running.

    Raises:
        FileNotFoundError: ``folder`` has no recording.
        BrokenRecording: a file is damaged; the message names it and the offset in bytes.
    """
    paths = {kind: folder / f"{kind}.otlp" for kind in get_args(Kind)}
    if not any(path.exists() for path in paths.values()):
        raise FileNotFoundError(f"{folder}: no recording; expected {_listed(paths.values())}")
    records = Records()
    for kind, path in paths.items():
        if path.exists():
            for offset, body in frames(path):
                try:
                    records.add(decode(kind, body))
                except DecodeError as error:
                    raise BrokenRecording(
                        f"{path}: the frame at byte {offset} is not an OTLP export request of "
                        f"{kind} ({error}); the file is damaged from there on"
                    ) from error
    return records


def frames(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the offset in bytes and the body of each complete frame of a file.

    Raises:
        BrokenRecording: a length is 0 or more than `MAX_BYTES`.
    """
    with path.open("rb") as file:
        for offset, length in _lengths(path, file):
            body = file.read(length)
            if len(body) < length:  # the file was truncated meanwhile
                return
            yield offset, body


class FrameWriter:
    """Appender of frames to one file; appended frames survive the end of this process.

    Not thread-safe.

    Args:
        path: the file, created if absent; a partial frame at its end is truncated.

    Raises:
        BlockingIOError: another process writes to the file.
        BrokenRecording: the existing file is damaged.
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._torn = False
        self._file = FileIO(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), "r+")
        try:
            self._lock()
            self._end = 0
            for offset, length in _lengths(path, self._file):
                self._file.seek(length, os.SEEK_CUR)
                self._end = offset + _PREFIX + length
            self._truncate()
        except BaseException:  # even a KeyboardInterrupt must leave no file open
            self._file.close()
            raise

    def append(self, body: bytes) -> None:
        """Append one frame completely or not at all.

        Raises:
            OSError: the frame could not be written, for example because the disk is full.
        """
        frame = len(body).to_bytes(_PREFIX, "little") + body
        written = 0
        if self._torn:
            self._truncate()
        try:
            while written < len(frame):
                written += self._file.write(frame[written:]) or 0
        except OSError:
            self._torn = True
            self._truncate()
            raise
        self._end += len(frame)

    def close(self) -> None:
        """Flush the file to disk and close it. May be called again."""
        if not self._file.closed:
            os.fsync(self._file.fileno())
            self._file.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BlockingIOError(
                f"{self.path}: another process records into this folder; choose another one"
            ) from error

    def _truncate(self) -> None:
        self._file.truncate(self._end)
        self._file.seek(self._end)
        self._torn = False


def _lengths(path: Path, file: RawIOBase | BufferedReader) -> Iterator[tuple[int, int]]:
    """Yield offset and length of each complete frame; the caller reads or skips each body."""
    size = os.fstat(file.fileno()).st_size
    offset = 0
    while offset + _PREFIX <= size:
        length = int.from_bytes(file.read(_PREFIX) or b"", "little")
        if not 0 < length <= MAX_BYTES:
            raise BrokenRecording(
                f"{path}: the frame at byte {offset} has a length of {length} bytes, expected 1 to "
                f"{MAX_BYTES}; the file is damaged from there on"
            )
        if offset + _PREFIX + length > size:
            return
        yield offset, length
        offset += _PREFIX + length


def _listed(paths: Iterable[Path]) -> str:
    return ", ".join(path.name for path in paths)
