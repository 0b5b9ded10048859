"""Functions that read recordings: folders that `Receiver` wrote, and OTLP as JSON lines.

The file exporter of the OpenTelemetry Collector writes JSON lines. Each line is one export request
of traces, logs or metrics. https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding
"""

from __future__ import annotations

from pathlib import Path

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from observability.otlp_json import NotOtlp, fill, read_object
from observability.receiver.frames import BrokenRecording, read_folder
from observability.records import Records, decode_logs, decode_traces

SUFFIXES = (".json", ".jsonl")
"""Suffixes of files that are read as JSON lines."""


def read_recording(path: Path) -> Records:
    """Read a folder that `Receiver` wrote, a file of JSON lines, or a folder of such files.

    Raises:
        FileNotFoundError: there is no recording.
        BrokenRecording: a file is damaged; the message names the file and the line or byte.
        OSError: a file cannot be read.
    """
    if not path.exists():
        return read_folder(path)  # raises FileNotFoundError, with the names of the expected files
    if not path.is_dir():
        return read_json_lines(path)
    files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES and file.is_file())
    if not files or any(path.glob("*.otlp")):
        return read_folder(path)
    records = Records()
    for file in files:
        records.add(read_json_lines(file))
    return records


def read_json_lines(path: Path) -> Records:
    """Read a file of JSON lines, each an OTLP export request.

    Empty lines and an unfinished last line are skipped.

    Raises:
        BrokenRecording: a line is not an export request; the message names the file and the line.
        OSError: the file cannot be read.
    """
    records = Records()
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                records.add(_decode(line))
            except NotOtlp as error:
                if not line.endswith(b"\n"):
                    break  # a writer has not finished this line yet
                raise BrokenRecording(f"{path}, line {number}: {error}") from None
    return records


def _decode(line: bytes) -> Records:
    request = read_object(line)
    if "resourceSpans" in request:
        return decode_traces(fill(ExportTraceServiceRequest(), request).SerializeToString())
    if "resourceLogs" in request:
        return decode_logs(fill(ExportLogsServiceRequest(), request).SerializeToString())
    if "resourceMetrics" in request:
        return Records()
    raise NotOtlp("expected resourceSpans, resourceLogs or resourceMetrics")
