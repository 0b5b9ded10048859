"""Recordings on disk: frames, their ends and their damages."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from observability.receiver_frames import BrokenRecording, FrameWriter, frames, read_folder


def traces(*names: str) -> bytes:
    request = ExportTraceServiceRequest()
    spans = request.resource_spans.add().scope_spans.add().spans
    for name in names:
        spans.add(trace_id=b"t" * 16, span_id=b"s" * 8, name=name)
    return request.SerializeToString()


def logs(*events: str) -> bytes:
    request = ExportLogsServiceRequest()
    records = request.resource_logs.add().scope_logs.add().log_records
    for event in events:
        records.add(event_name=f"dataplane.{event}")
    return request.SerializeToString()


def written(path: Path, *bodies: bytes) -> Path:
    writer = FrameWriter(path)
    for body in bodies:
        writer.append(body)
    writer.close()
    return path


BODIES = st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=6)


@given(bodies=BODIES)
@settings(max_examples=40)
def test_every_cut_leaves_the_whole_frames_before_it(bodies: list[bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = written(Path(folder) / "traces.otlp", *bodies)
        content = path.read_bytes()
        ends = [0]
        for body in bodies:
            ends.append(ends[-1] + 4 + len(body))
        for cut in range(len(content) + 1):
            path.write_bytes(content[:cut])
            whole = sum(end <= cut for end in ends[1:])
            assert [body for _, body in frames(path)] == bodies[:whole]
            assert [offset for offset, _ in frames(path)] == ends[:whole]


@given(bodies=BODIES, more=st.binary(min_size=1, max_size=40), data=st.data())
@settings(max_examples=40)
def test_a_file_goes_on_after_its_last_whole_frame(
    bodies: list[bytes], more: bytes, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = written(Path(folder) / "traces.otlp", *bodies)
        content = path.read_bytes()
        last = len(content) - 4 - len(bodies[-1])
        path.write_bytes(content[: data.draw(st.integers(last, len(content) - 1))])
        written(path, more)
        assert [body for _, body in frames(path)] == [*bodies[:-1], more]


def test_a_folder_reads_back_as_what_was_written(tmp_path: Path) -> None:
    written(tmp_path / "traces.otlp", traces("a", "b"), traces("c"))
    written(tmp_path / "logs.otlp", logs("put"), logs("claimed", "read"))
    records = read_folder(tmp_path)
    assert [span.name for span in records.spans] == ["a", "b", "c"]
    assert [event.name for event in records.events] == ["put", "claimed", "read"]


def test_a_folder_without_a_recording_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"traces\.otlp, logs\.otlp, metrics\.otlp"):
        read_folder(tmp_path)


def test_a_frame_that_is_no_request_is_refused_with_file_and_offset(tmp_path: Path) -> None:
    first = traces("a")
    path = written(tmp_path / "traces.otlp", first, b"\xff" * 9, traces("b"))
    with pytest.raises(BrokenRecording) as caught:
        read_folder(tmp_path)
    assert str(path) in str(caught.value)
    assert f"at byte {4 + len(first)} " in str(caught.value)


@pytest.mark.parametrize("length", [0, (1 << 30) + 1, 0xFFFFFFFF])
def test_a_length_that_is_none_is_refused_with_file_and_offset(tmp_path: Path, length: int) -> None:
    first = traces("a")
    path = written(tmp_path / "traces.otlp", first)
    path.write_bytes(path.read_bytes() + length.to_bytes(4, "little") + b"x" * 20)
    for read in (lambda: read_folder(tmp_path), lambda: FrameWriter(path)):
        with pytest.raises(BrokenRecording, match=f"at byte {4 + len(first)} says it is {length} "):
            read()


def test_a_second_writer_of_a_file_is_refused(tmp_path: Path) -> None:
    writer = FrameWriter(tmp_path / "traces.otlp")
    with pytest.raises(BlockingIOError, match="another process records"):
        FrameWriter(tmp_path / "traces.otlp")
    writer.close()
    FrameWriter(tmp_path / "traces.otlp").close()


def test_a_full_disk_leaves_whole_frames_and_writing_goes_on_when_there_is_room(
    tmp_path: Path,
) -> None:
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    writer = FrameWriter(tmp_path / "traces.otlp")
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, old[1]))
        writer.append(b"a" * 60)
        with pytest.raises(OSError, match="File too large"):
            writer.append(b"b" * 60)
        assert (tmp_path / "traces.otlp").stat().st_size == 64
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
    writer.append(b"c" * 60)
    writer.close()
    assert [body for _, body in frames(tmp_path / "traces.otlp")] == [b"a" * 60, b"c" * 60]


def test_what_was_appended_survives_the_death_of_the_writer(tmp_path: Path) -> None:
    script = """
import os, signal, sys
from pathlib import Path
from observability.receiver_frames import FrameWriter
writer = FrameWriter(Path(sys.argv[1]))
for number in range(100):
    writer.append(bytes([number + 1]) * 1000)
os.kill(os.getpid(), signal.SIGKILL)
"""
    path = tmp_path / "logs.otlp"
    ran = subprocess.run([sys.executable, "-c", script, path], timeout=60, check=False)
    assert ran.returncode == -signal.SIGKILL
    assert [body[0] for _, body in frames(path)] == list(range(1, 101))


def test_files_are_not_writable_for_others(tmp_path: Path) -> None:
    path = written(tmp_path / "traces.otlp", b"x")
    assert os.stat(path).st_mode & 0o022 == 0
