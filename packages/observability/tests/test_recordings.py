"""Recordings on disk: frames of a 4-byte length and a body, also truncated or damaged."""

from __future__ import annotations

import http.client
import resource
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from otlp_requests import PROTOBUF, WAIT_S, logs, metrics, post, traces
from structlog.testing import capture_logs

from observability.receiver import BrokenRecording, Receiver, read_folder


def frames_of(*bodies: bytes) -> bytes:
    return b"".join(len(body).to_bytes(4, "little") + body for body in bodies)


def span_names(folder: Path) -> list[str]:
    return [span.name for span in read_folder(folder).spans]


SPANS = st.lists(st.text("abc", min_size=1, max_size=3), min_size=1, max_size=4, unique=True)


@given(spans=SPANS)
@settings(max_examples=5)
def test_a_truncated_recording_yields_every_complete_frame(
    spans: list[str],
) -> None:
    bodies = [traces(name) for name in spans]
    content = frames_of(*bodies)
    ends = [len(frames_of(*bodies[: number + 1])) for number in range(len(bodies))]
    with tempfile.TemporaryDirectory() as folder:
        for cut in range(len(content) + 1):
            (Path(folder) / "traces.otlp").write_bytes(content[:cut])
            assert span_names(Path(folder)) == spans[: sum(end <= cut for end in ends)]


@pytest.mark.parametrize("cut", [1, 5, 9])
def test_a_recording_continues_after_its_last_complete_frame(tmp_path: Path, cut: int) -> None:
    (tmp_path / "traces.otlp").write_bytes(frames_of(traces("a"), traces("b"))[:-cut])
    with Receiver(tmp_path) as receiver:
        post(receiver, body=traces("c"))
    assert (tmp_path / "traces.otlp").read_bytes() == frames_of(traces("a"), traces("c"))
    assert (tmp_path / "traces.otlp").stat().st_mode & 0o022 == 0


def test_a_folder_retains_the_requests_of_all_receivers(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    for name in ("a", "b"):
        with Receiver(folder) as receiver:
            post(receiver, body=traces(name))
            post(receiver, "/v1/logs", logs(name))
            post(receiver, "/v1/metrics", metrics())
            post(receiver, body=b"")  # an empty request is accepted, but not stored
    assert span_names(folder) == ["a", "b"]
    assert [event.name for event in read_folder(folder).events] == ["a", "b"]
    assert (folder / "metrics.otlp").read_bytes() == frames_of(metrics(), metrics())


def test_a_folder_without_a_recording_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"traces\.otlp, logs\.otlp, metrics\.otlp"):
        read_folder(tmp_path)


@pytest.mark.parametrize("length", [0, (1 << 30) + 1, 0xFFFFFFFF])
def test_invalid_frame_length_names_file_and_offset(tmp_path: Path, length: int) -> None:
    content = frames_of(traces("a")) + length.to_bytes(4, "little") + b"x" * 20
    (tmp_path / "traces.otlp").write_bytes(content)
    for read in (read_folder, Receiver):
        with pytest.raises(BrokenRecording, match=f"has a length of {length} ") as caught:
            read(tmp_path)
        assert f"{tmp_path}/traces.otlp" in str(caught.value)
        assert f"at byte {len(frames_of(traces('a')))} " in str(caught.value)


def test_an_invalid_frame_body_names_file_and_offset(tmp_path: Path) -> None:
    (tmp_path / "traces.otlp").write_bytes(frames_of(traces("a"), b"\xff" * 9, traces("b")))
    with pytest.raises(BrokenRecording, match=f"at byte {len(frames_of(traces('a')))} ") as caught:
        read_folder(tmp_path)
    assert f"{tmp_path}/traces.otlp" in str(caught.value)


def test_a_folder_in_use_is_refused_and_no_file_stays_open(tmp_path: Path) -> None:
    with Receiver(tmp_path) as receiver:
        with pytest.raises(BlockingIOError, match="another process records"):
            Receiver(tmp_path)
        assert post(receiver, body=traces("a"))[0] == 200
    with pytest.raises(ValueError, match="expected http"):
        Receiver(tmp_path, forward="not a url")
    Receiver(tmp_path).close()


def test_a_full_disk_logs_one_warning_and_recording_resumes(
    tmp_path: Path,
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    bodies = [traces(letter * 100) for letter in "abcde"]
    with Receiver(tmp_path) as receiver, capture_logs() as logged:
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (len(bodies[0]) * 2, limits[1]))
            for body in bodies:
                assert post(receiver, body=body)[0] == 200
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, handler)
        assert len(receiver.snapshot().spans) == 5
        assert receiver.counts()["unsaved"] == 4
        assert [line["event"] for line in logged] == ["recording_failed"]
        post(receiver, body=traces("f"))
    assert span_names(tmp_path) == ["a" * 100, "f"]


def test_accepted_requests_survive_a_killed_receiver(tmp_path: Path) -> None:
    script = """
import sys, threading
from pathlib import Path
from observability.receiver import Receiver
print(Receiver(Path(sys.argv[1])).port, flush=True)
threading.Event().wait()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script, tmp_path], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    port = int(process.stdout.readline())
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    for number in range(50):
        connection.request("POST", "/v1/traces", traces(str(number)), PROTOBUF)
        assert connection.getresponse().read() == b""
    process.kill()
    process.communicate()
    connection.close()
    assert span_names(tmp_path) == [str(number) for number in range(50)]
