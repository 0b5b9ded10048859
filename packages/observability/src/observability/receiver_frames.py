"""Recordings: what arrived over OTLP, kept in a folder and read back.

A folder holds ``traces.otlp``, ``logs.otlp`` and ``metrics.otlp``. Each is a sequence of frames:
the length of a body in 4 bytes, little-endian, then the body, the bytes of one OTLP export request.
A frame is never empty. A process that is killed while it writes leaves half a frame at the end,
which is cut off when the file is written to again and ignored when it is read.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator
from io import BufferedReader, FileIO, RawIOBase
from pathlib import Path
from typing import Literal, get_args

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)

from observability.records import Records, decode_logs, decode_traces
from observability.wire import parse

Kind = Literal["traces", "logs", "metrics"]
"""What a file holds; also the last part of the path it was posted to."""

MOST_BYTES = 1 << 30
"""No frame is longer; a length beyond it is no length."""

_PREFIX = 4


class BrokenRecording(ValueError):
    """A file of a recording holds something that is no frame, before its end."""


def decode(kind: Kind, body: bytes) -> Records:
    """What one export request tells; metrics are only looked at, and tell no records.

    Raises:
        google.protobuf.message.DecodeError: ``body`` is no such request.
    """
    if kind == "traces":
        return decode_traces(body)
    if kind == "logs":
        return decode_logs(body)
    parse(ExportMetricsServiceRequest(), body)
    return Records()


def read_folder(folder: Path) -> Records:
    """Read a recording, of a process that ended, was killed or still goes on.

    Raises:
        FileNotFoundError: there is none in ``folder``.
        BrokenRecording: a file is damaged; names it and the offset in bytes.
    """
    paths = {kind: folder / f"{kind}.otlp" for kind in get_args(Kind)}
    if not any(path.exists() for path in paths.values()):
        raise FileNotFoundError(f"{folder}: no recording, expected {_listed(paths.values())}")
    records = Records()
    for kind, path in paths.items():
        if path.exists():
            for offset, body in frames(path):
                try:
                    records.add(decode(kind, body))
                except DecodeError as error:
                    raise BrokenRecording(
                        f"{path}: the frame at byte {offset} is no OTLP export request of {kind} "
                        f"({error}); the file is damaged from there on"
                    ) from error
    return records


def frames(path: Path) -> Iterator[tuple[int, bytes]]:
    """The offset in bytes and the body of every whole frame of a file.

    Raises:
        BrokenRecording: a length is 0 or more than `MOST_BYTES`.
    """
    with path.open("rb") as file:
        for offset, length in _lengths(path, file):
            body = file.read(length)
            if len(body) < length:  # it was longer when its end was looked up
                return
            yield offset, body


class FrameWriter:
    """Appends frames to one file; what was appended survives the end of this process.

    Not thread-safe.

    Args:
        path: opened, or made; half a frame at its end is cut off.

    Raises:
        BlockingIOError: another process writes to it.
        BrokenRecording: what is there already is damaged.
        OSError: it cannot be opened.
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
            self._cut()
        except BaseException:
            self._file.close()
            raise

    def append(self, body: bytes) -> None:
        """Append one frame as a whole or not at all.

        Raises:
            OSError: it could not be written, because the disk is full for example.
        """
        frame = len(body).to_bytes(_PREFIX, "little") + body
        written = 0
        if self._torn:
            self._cut()
        try:
            while written < len(frame):
                written += self._file.write(frame[written:]) or 0
        except OSError:
            self._torn = True
            self._cut()
            raise
        self._end += len(frame)

    def close(self) -> None:
        """Write what the system still holds to the disk, and close. May be called again."""
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

    def _cut(self) -> None:
        self._file.truncate(self._end)
        self._file.seek(self._end)
        self._torn = False


def _lengths(path: Path, file: RawIOBase | BufferedReader) -> Iterator[tuple[int, int]]:
    """Offset and length of every whole frame; the caller reads or skips each body."""
    size = os.fstat(file.fileno()).st_size
    offset = 0
    while offset + _PREFIX <= size:
        length = int.from_bytes(file.read(_PREFIX) or b"", "little")
        if not 0 < length <= MOST_BYTES:
            raise BrokenRecording(
                f"{path}: the frame at byte {offset} says it is {length} bytes long, expected 1 to "
                f"{MOST_BYTES}; the file is damaged from there on"
            )
        if offset + _PREFIX + length > size:
            return
        yield offset, length
        offset += _PREFIX + length


def _listed(paths: Iterable[Path]) -> str:
    return ", ".join(path.name for path in paths)
