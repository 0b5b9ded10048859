"""The command ``grpo-trace``: a traced run, what is shown of it afterwards, and refusals."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from integration.lean_ray import LEAN, LEAN_ENVIRONMENT
from integration.waiting import wait_until

from observability.receiver import Receiver, read_folder

pytestmark = pytest.mark.slow

COMMAND = str(Path(sys.executable).with_name("grpo-trace"))


def run(*arguments, folder, timeout=60, beginning=()):
    return subprocess.run(
        [*beginning, COMMAND, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=folder,
        env={**os.environ, **LEAN_ENVIRONMENT, "HF_HUB_OFFLINE": "1", "COLUMNS": "120"},
    )


def write_config(raw_config, folder, changes=()):
    raw = raw_config({"run.output": str(folder / "runs"), **dict(changes)})
    (folder / "config.yaml").write_text(yaml.safe_dump(raw))


@pytest.fixture(scope="module")
def collector():
    with Receiver() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def traced(tmp_path_factory, raw_config, collector):
    """A run of two steps: its folder and what was printed."""
    folder = tmp_path_factory.mktemp("trace")
    write_config(raw_config, folder)
    done = run(
        "--steps",
        2,
        "--config",
        "config.yaml",
        "--html",
        "pages/trace.html",
        "--perfetto",
        "pages/trace.json",
        "--otlp",
        collector.endpoint,
        folder=folder,
        timeout=240,
        beginning=LEAN,
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
        "Bytes by stage",
        "Process-seconds by bucket",
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


def test_a_collector_gets_everything_as_well(traced, records, collector):
    forwarded = collector.snapshot()
    assert {span.span_id for span in forwarded.spans} == {span.span_id for span in records.spans}
    assert len(forwarded.events) == len(records.events)


def test_a_sample_is_followed_from_its_put_to_its_clear(traced, records):
    folder, _ = traced
    trained = next(event for event in records.events if event.name == "trained")
    done = run("sample", trained.sample_ids[0], folder=folder)
    lines = [line.split() for line in done.stdout.splitlines()[2:] if not line.startswith("     ")]
    # A duration, "0 s" or "12 ms", comes first.
    what = [line[2] for line in lines]
    assert what[0] == "put"
    assert what[-3:] == ["trained", "acknowledged", "cleared"]
    assert what.count("claimed") == 3
    assert what.count("read") == 3  # logprobs, reference, train


def test_wrong_options_are_reported_together_before_a_run(tmp_path):
    (tmp_path / "file").write_text("")
    wrong = {
        "--steps": "0",
        "--html": ".",
        "--perfetto": "file/x.json",
        "--folder": "file",
        "--otlp": "nonsense",
        "--set nothing": "nothing",
    }
    given = (text for option, value in wrong.items() for text in (option.split()[0], value))
    done = run(*given, folder=tmp_path)
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    assert [line.split(":")[1].strip() for line in lines] == list(wrong), done.stderr


def test_a_folder_without_a_recording_is_named_by_its_option(tmp_path):
    done = run("show", "--folder", "nofile", folder=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith("error: --folder: nofile: no recording")


def test_an_unknown_sample_is_an_error_with_similar_ids(traced, records):
    folder, _ = traced
    trained = next(event for event in records.events if event.name == "trained")
    almost = trained.sample_ids[0][:-1]
    done = run("sample", almost, folder=folder)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: no event names the sample {almost!r}")
    assert trained.sample_ids[0] in done.stderr


# observability's tests run the command on a stuck process without a trainer.
@pytest.mark.long
def test_why_names_what_a_stuck_run_is_blocked_on(tmp_path, raw_config):
    write_config(raw_config, tmp_path, {"cluster.temp_dir": None})
    errors = tmp_path / "errors"
    with errors.open("wb") as file:
        started = subprocess.Popen(
            [COMMAND, "--steps", "1000", "--config", "config.yaml", "--folder", "traced"],
            cwd=tmp_path,
            stdout=subprocess.DEVNULL,
            stderr=file,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
    stopped = None
    try:
        stopped = wait_until(lambda: generation_worker(tmp_path / "traced"), 180)
        os.kill(stopped, signal.SIGSTOP)
        shown = wait_until(lambda: stuck(run("why", "--folder", "traced", folder=tmp_path).stdout))
        # Depends on the moment: the rollout is blocked on a response, or the driver on a refit.
        assert re.search(
            r"grpo\.(rollout|driver) has been blocked for \S+ m?s on generation worker: ", shown
        )
    finally:
        # The driver can be terminated while the call that it waits for hangs.
        started.terminate()
        status = started.wait(60)
        if stopped is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(stopped, signal.SIGCONT)
        assert status == 128 + signal.SIGTERM, errors.read_text()


def generation_worker(folder):
    """Return the pid of the generation worker once it has reported an event."""
    try:
        events = read_folder(folder).events
    except FileNotFoundError:
        return None
    pids = [event.process.pid for event in events if event.process.service == "grpo.generation"]
    return pids[0] if pids else None


def stuck(shown):
    joined = " ".join(shown.split())
    return joined if re.search("on generation worker: (?!ready)", joined) else None


def test_why_finds_nothing_blocked_in_a_finished_run(traced):
    done = run("why", folder=traced[0])
    assert (done.returncode, done.stdout.strip()) == (0, "No task is blocked.")


def test_show_repeats_what_the_run_showed(traced):
    folder, shown = traced
    again = run("show", folder=folder).stdout
    assert again.strip() in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "1", "--set", "data.train=nowhere.jsonl"], "nowhere.jsonl"),
        (["--folder", "f", "why"], "--folder is before 'why'"),
        (["show"], "error: no traced run below runs/traces"),
        (["--steps", "1", "--config", "nowhere.yaml"], "nowhere.yaml"),
    ],
)
def test_an_impossible_request_fails_with_one_message(tmp_path, arguments, message):
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


def test_what_if_predicts_from_a_traced_run(traced):
    done = run("what-if", "--generators", "+2", "--staleness", "1", "--json", folder=traced[0])
    answer = json.loads(done.stdout)
    assert (answer["recorded"]["generators"], answer["recorded"]["staleness"]) == (1, 0)
    assert (answer["what_if"]["generators"], answer["what_if"]["staleness"]) == (3, 1)
    assert 0 < answer["what_if"]["step_s"] < answer["long_run"]["step_s"]
    shown = run("what-if", folder=traced[0]).stdout
    assert re.search(r"^The replayed step differs from the recorded one by [+-]", shown, re.M)


@pytest.mark.parametrize(("given", "reason"), [("many", "found 'many'"), ("-1", "leaves 0")])
def test_what_if_refuses_numbers_of_generators(traced, given, reason):
    done = run("what-if", "--generators", given, folder=traced[0])
    assert done.returncode == 2
    assert done.stderr.startswith("error: --generators: ")
    assert reason in done.stderr


@pytest.mark.long
def test_what_if_reads_the_setting_of_an_asynchronous_run(tmp_path, raw_config):
    changes = {
        "grpo.mode": "async",
        "grpo.asynchronous.max_staleness": 2,
        "grpo.asynchronous.prompts_per_rollout": 1,
        "grpo.asynchronous.concurrent_rollouts": 3,
        "policy.generation.simulated_latency": {"median_s": 0.2, "sigma": 0.0},
    }
    write_config(raw_config, tmp_path, changes)
    done = run(
        "--steps", 6, "--config", "config.yaml", "--folder", "traced", folder=tmp_path, timeout=240
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(run("what-if", "--folder", "traced", "--json", folder=tmp_path).stdout)
    recorded = answer["recorded"]
    assert recorded["generators"] == 1
    assert recorded["concurrent_rollouts"] == 3
    assert recorded["staleness"] == 2
    assert answer["what_if"] == answer["long_run"]
