"""The command ``grpo-trace``: a traced run, what is shown of it afterwards, and refusals."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from observability.receiver import read_folder

COMMAND = str(Path(sys.executable).with_name("grpo-trace"))


def run(*arguments, folder, timeout=60):
    return subprocess.run(
        [COMMAND, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=folder,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "120"},
    )


@pytest.fixture(scope="module")
def traced(tmp_path_factory, raw_config):
    """A run of two steps: its folder and what was printed."""
    import yaml

    folder = tmp_path_factory.mktemp("trace")
    raw = raw_config({"run.output": str(folder / "runs")})
    (folder / "config.yaml").write_text(yaml.safe_dump(raw))
    done = run(
        "--steps",
        2,
        "--config",
        "config.yaml",
        "--html",
        "pages/trace.html",
        "--perfetto",
        "pages/trace.json",
        folder=folder,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


@pytest.fixture(scope="module")
def records(traced):
    [kept] = (traced[0] / "runs" / "traces").iterdir()
    return read_folder(kept)


def test_each_step_is_shown_as_a_waterfall_with_its_tables(traced):
    _, shown = traced
    assert re.search(r"^step 0 of run demo/\S+: .* spans, trace [0-9a-f]{32}$", shown, re.M)
    assert re.search(r"^step 1 of run demo/", shown, re.M)
    for title in (
        "Processes",
        "Critical path",
        "Bytes through the data plane",
        "Process-seconds",
        "Slowest operations",
    ):
        assert shown.count(title) == 2
    assert "staleness: 0 to 0 versions" in shown
    assert "incomplete" not in shown
    assert shown.rstrip().splitlines()[-1].startswith("trace  runs/traces/")


def test_the_page_and_the_perfetto_file_are_written(traced):
    folder, _ = traced
    page = (folder / "pages" / "trace.html").read_text()
    assert "compute_logprobs" in page
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", page)
    events = json.loads((folder / "pages" / "trace.json").read_text())["traceEvents"]
    assert {"grpo.step", "optimizer_step"} <= {event["name"] for event in events}


def test_a_sample_is_followed_from_its_put_to_its_clear(traced, records):
    folder, _ = traced
    trained = next(event for event in records.events if event.name == "trained")
    done = run("sample", trained.sample_ids[0], folder=folder)
    lines = [line.split() for line in done.stdout.splitlines()[2:] if not line.startswith("     ")]
    # A duration, "0 s" or "12 ms", comes first.
    what = [line[2] for line in lines]
    assert what[0] == "put"
    assert what[-2:] == ["trained", "cleared"]
    assert what.count("read") == 3  # logprobs, reference, train


def test_a_sample_that_nobody_names_is_an_error_with_the_nearest_ones(traced, records):
    folder, _ = traced
    trained = next(event for event in records.events if event.name == "trained")
    almost = trained.sample_ids[0][:-1]
    done = run("sample", almost, folder=folder)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: no event names the sample {almost!r}")
    assert trained.sample_ids[0] in done.stderr


def test_of_a_run_that_ended_nothing_waits(traced):
    done = run("why", folder=traced[0])
    assert (done.returncode, done.stdout.strip()) == (0, "nothing waits")


def test_show_repeats_what_the_run_showed(traced):
    folder, shown = traced
    again = run("show", folder=folder).stdout
    assert again.strip() in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show"], "error: no traced run below runs/traces"),
        (["why", "--folder", "nowhere"], "nowhere"),
        (["--steps", "1", "--config", "nowhere.yaml"], "nowhere.yaml"),
        (["--steps", "1", "--otlp", "not a url"], "not a url"),
        (["--steps", "0"], "--steps"),
    ],
)
def test_what_cannot_be_done_is_one_message(tmp_path, arguments, message):
    done = run(*arguments, folder=tmp_path)
    assert done.returncode in (1, 2)
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_trace_that_is_damaged_is_named(tmp_path):
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "traces.otlp").write_bytes(b"\x04\x00\x00\x00????" + b"\x00" * 8)
    done = run("show", "--folder", damaged, folder=tmp_path)
    assert done.returncode == 1
    assert "traces.otlp" in done.stderr
