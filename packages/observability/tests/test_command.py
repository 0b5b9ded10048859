"""The commands of ``python -m observability``, on recordings of a small run.

Imports internals: the tables are compared with the recording that was read.
"""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from otlp_requests import post

from observability.receiver import Receiver, read_folder
from observability.recordings import (
    read_recording,
)

TRACE = bytes(range(16))
ROOT, CHILD = b"\x01" * 8, b"\x02" * 8
BEGIN_NS = 1_790_000_000_000_000_000


def add_attribute(holder: Any, name: str, value: str | int) -> None:
    pair = holder.attributes.add(key=name)
    if isinstance(value, int):
        pair.value.int_value = value
    else:
        pair.value.string_value = value


def set_resource_attributes(resource: Any) -> None:
    add_attribute(resource, "service.name", "train")
    add_attribute(resource, "host.name", "node-with-a-long-name")
    add_attribute(resource, "process.pid", 1234567)


def step_request() -> ExportTraceServiceRequest:
    request = ExportTraceServiceRequest()
    resource_spans = request.resource_spans.add()
    set_resource_attributes(resource_spans.resource)
    spans = resource_spans.scope_spans.add().spans
    for span_id, parent, name, start_s, end_s in (
        (ROOT, b"", "grpo.step", 0, 4),
        (CHILD, ROOT, "optimizer_step", 1, 3),
    ):
        span = spans.add(trace_id=TRACE, span_id=span_id, parent_span_id=parent, name=name)
        span.start_time_unix_nano = BEGIN_NS + start_s * 10**9
        span.end_time_unix_nano = BEGIN_NS + end_s * 10**9
        add_attribute(span, "rl.step", 7)
        add_attribute(span, "rl.run_id", "my-run")
        add_attribute(span, "rl.bucket", "productive")
    return request


def events_request(begin_ns: int = BEGIN_NS, run_id: str = "my-run") -> ExportLogsServiceRequest:
    request = ExportLogsServiceRequest()
    resource_logs = request.resource_logs.add()
    set_resource_attributes(resource_logs.resource)
    records = resource_logs.scope_logs.add().log_records
    put = records.add(event_name="dataplane.put", time_unix_nano=begin_ns + 10**9)
    put.trace_id, put.span_id = TRACE, CHILD
    put.body.string_value = '["p0_g0"]'
    waiting = records.add(event_name="dataplane.waiting", time_unix_nano=begin_ns + 2 * 10**9)
    add_attribute(waiting, "dataplane.task", "train")
    add_attribute(waiting, "dataplane.samples", 8)
    for record in (put, waiting):
        add_attribute(record, "dataplane.partition", "batch")
        add_attribute(record, "rl.run_id", run_id)
    return request


def json_line(request: Any) -> str:
    """Encode a request as a line of OTLP's JSON, with ids in hexadecimal."""
    line = json.dumps(MessageToDict(request))
    for raw_id in (TRACE, ROOT, CHILD):
        line = line.replace(base64.b64encode(raw_id).decode(), raw_id.hex())
    return line + "\n"


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recording")
    with Receiver(folder) as receiver:
        for path, request in (("/v1/traces", step_request()), ("/v1/logs", events_request())):
            assert post(receiver, path, request.SerializeToString())[0] == 200
    return folder


def run_command(
    *arguments: object, width: int = 80, **variables: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "observability", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "COLUMNS": str(width), "NO_COLOR": "1", **variables},
    )


def output_of(*arguments: object, **options: Any) -> str:
    result = run_command(*arguments, **options)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_show_prints_waterfall_and_tables_within_80_columns(recording: Path) -> None:
    shown = output_of("show", recording)
    assert "step 7 of run my-run: 4.00 s" in shown
    assert TRACE.hex() in shown
    for title in ("Processes", "Critical path", "Process-seconds", "Slowest operations"):
        assert title in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_show_writes_page_and_perfetto_file(recording: Path, tmp_path: Path) -> None:
    page, trace = tmp_path / "new" / "page.html", tmp_path / "trace.json"
    shown = output_of("show", recording, "--html", page, "--perfetto", trace, "--json")
    assert [step["step"] for step in json.loads(shown)] == [7]
    assert "optimizer_step" in page.read_text()
    assert json.loads(trace.read_text())["traceEvents"]


def test_show_as_json_has_the_figures(recording: Path) -> None:
    [step] = json.loads(output_of("show", recording, "--step", 7, "--json"))
    assert (step["run_id"], step["trace_id"], step["seconds"]) == ("my-run", TRACE.hex(), 4)
    assert [part["seconds"] for part in step["critical_path"]] == [1, 2, 1]
    [process] = step["processes"]
    assert (process["service"], process["pid"], process["busy_seconds"]) == ("train", 1234567, 4)


def test_why_lists_the_blocked_task_of_a_silent_process(recording: Path) -> None:
    shown = " ".join(output_of("why", recording).split())
    # The step ended two seconds after the report of the wait, and long ago.
    assert "1. task 'train' in train has been blocked for 2.00 s" in shown
    assert re.search(r"Durations are up to the last record, \d+ \S+ .*ago\.$", shown)
    [wait] = json.loads(output_of("why", recording, "--json"))
    assert (wait["task"], wait["partition"], wait["requested"]) == ("train", "batch", 8)
    assert wait["seconds"] == 2
    assert wait["sentence"].startswith("task 'train' in train has been blocked for")
    assert wait["present"] == 1


def test_why_counts_up_to_the_present_while_records_arrive(tmp_path: Path) -> None:
    begin_ns = time.time_ns() - 60 * 10**9
    (tmp_path / "events.json").write_text(json_line(events_request(begin_ns)))
    assert "Durations are" not in output_of("why", tmp_path)
    [wait] = json.loads(output_of("why", tmp_path, "--json"))
    assert 58 <= wait["seconds"] <= 300


def test_why_reports_that_nothing_is_blocked(tmp_path: Path) -> None:
    (tmp_path / "traces.json").write_text(json_line(step_request()))
    assert output_of("why", tmp_path).strip() == "No task is blocked."
    assert json.loads(output_of("why", tmp_path, "--json")) == []


def test_sample_prints_its_lifecycle(recording: Path) -> None:
    shown = output_of("sample", "p0_g0", recording)
    assert shown.splitlines()[0] == "sample p0_g0"
    assert "put" in shown
    lineage = json.loads(output_of("sample", "p0_g0", recording, "--json"))
    assert lineage["sample_id"] == "p0_g0"
    [hop] = lineage["hops"]
    assert (hop["name"], hop["partition"], hop["stage"]) == ("put", "batch", "optimizer_step")


def test_sample_shows_one_run_and_names_the_others(tmp_path: Path) -> None:
    requests = (events_request(), events_request(BEGIN_NS + 9 * 10**9, "newer"))
    (tmp_path / "logs.json").write_text("".join(map(json_line, requests)))
    for options, run, other in (([], "newer", "my-run"), (["--run", "my-run"], "my-run", "newer")):
        shown = output_of("sample", "p0_g0", tmp_path, *options)
        assert f"Shown for run '{run}'; --run shows '{other}'." in shown
        lineage = json.loads(output_of("sample", "p0_g0", tmp_path, "--json", *options))
        assert (lineage["run_id"], lineage["other_runs"]) == (run, [other])
        assert [hop["run_id"] for hop in lineage["hops"]] == [run]
    result = run_command("sample", "p0_g0", tmp_path, "--run", "none")
    assert "no event of run 'none' names the sample; see runs 'newer', 'my-run'" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "nowhere"], "nowhere: no recording; expected traces.otlp"),
        (["show", "."], "no recording; expected traces.otlp"),
        (["show", "{recording}", "--step", "8"], "error: no step 8 in the recording"),
        (["show", "{recording}", "--html", "/dev/null/x"], "/dev/null/x: cannot be written"),
        (["why", "{recording}/traces.otlp"], "traces.otlp, line 1: not OTLP in JSON"),
        (["sample", "p0", "{recording}"], "no event names the sample 'p0'; similar ids"),
    ],
)
def test_errors_are_one_line_and_exit_status_1(
    arguments: list[str], message: str, recording: Path, tmp_path: Path
) -> None:
    actual = [str(tmp_path) if each == "." else each for each in arguments]
    result = run_command(*(each.replace("{recording}", str(recording)) for each in actual))
    assert result.returncode == 1
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_wrong_usage_has_exit_status_2() -> None:
    assert run_command("show").returncode == 2
    assert run_command("nothing").returncode == 2


def test_version_and_help(recording: Path) -> None:
    assert output_of("--version") == f"observability {version('observability')}\n"
    for arguments in ([], ["show"], ["why"], ["sample"]):
        shown = output_of(*arguments, "--help")
        beginning, _, options = shown.partition("\u256d")
        command = " ".join(["python -m observability", *arguments])
        assert re.search(rf"^ Example: {command}.*\n *\n", beginning, re.MULTILINE)
        assert max(map(len, shown.splitlines())) <= 80
        assert "\u2026" not in shown
        assert arguments or "Exit status: 0 on success" in options


def test_shell_completion_lists_the_commands() -> None:
    result = subprocess.run(
        [sys.executable, "-c", "from observability.cli import app; app(prog_name='observability')"],
        capture_output=True,
        text=True,
        timeout=120,
        env={
            **os.environ,
            "_OBSERVABILITY_COMPLETE": "complete_bash",
            "COMP_WORDS": "observability ",
            "COMP_CWORD": "1",
        },
    )
    assert result.stdout.split() == ["show", "why", "sample"]


def test_json_lines_are_read_like_a_recording(recording: Path, tmp_path: Path) -> None:
    lines = json_line(step_request()) + "\n" + json_line(events_request())
    file = tmp_path / "otlp.jsonl"
    file.write_text(lines + '{"resourceMetrics": []}\n' + '{"resourceSpans": [{"unfini')
    expected = read_folder(recording)
    for path in (file, tmp_path):
        records = read_recording(path)
        assert records.spans == expected.spans
        assert records.events == expected.events


def test_without_the_extra_the_error_names_it(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise ModuleNotFoundError(name='typer')")
    result = run_command("show", ".", PYTHONPATH=str(tmp_path))
    assert result.returncode == 1
    assert "needs the extra observability[views] (typer is missing)" in result.stderr
