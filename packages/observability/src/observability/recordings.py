"""Functions that read recordings: folders that `Receiver` wrote, and OTLP as JSON lines.

The file exporter of the OpenTelemetry Collector writes JSON lines. Each line is one export request
of traces, logs or metrics. https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any  # Any: JSON values

from google.protobuf.json_format import ParseDict, ParseError
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from observability.receiver.frames import BrokenRecording, read_folder
from observability.records import Records, decode_logs, decode_traces

SUFFIXES = (".json", ".jsonl")
"""Suffixes of files that are read as JSON lines."""

# OTLP's JSON encodes ids in hexadecimal; protobuf's JSON encodes all bytes in base64.
_IDS = frozenset({"traceId", "spanId", "parentSpanId"})


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
                records.add(_decode(json.loads(line)))
            except (ValueError, ParseError, RecursionError) as error:
                if not line.endswith(b"\n"):
                    break  # a writer has not finished this line yet
                raise BrokenRecording(
                    f"{path}, line {number}: not an OTLP export request as JSON ({error})"
                ) from None
    return records


def _decode(request: Any) -> Records:
    if not isinstance(request, dict):
        raise ValueError("expected an object")
    if "resourceSpans" in request:
        traces = ParseDict(_with_base64(request), ExportTraceServiceRequest(), True)
        return decode_traces(traces.SerializeToString())
    if "resourceLogs" in request:
        logs = ParseDict(_with_base64(request), ExportLogsServiceRequest(), True)
        return decode_logs(logs.SerializeToString())
    if "resourceMetrics" in request:
        return Records()
    raise ValueError("expected resourceSpans, resourceLogs or resourceMetrics")


def _with_base64(value: Any) -> Any:
    """Return a JSON value with its ids in base64, as protobuf's parser requires."""
    if isinstance(value, list):
        return [_with_base64(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: base64.b64encode(bytes.fromhex(item)).decode()
        if key in _IDS and isinstance(item, str)
        else _with_base64(item)
        for key, item in value.items()
    }
