"""Whole runs: to the end, and cut short by the death of each kind of process.

Every test starts its own Ray, which takes half a minute; so the run whose generation worker dies is
also the one that is resumed.
"""

from __future__ import annotations

import json
import shutil
import signal
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import ray

import grpo_trainer
from grpo_trainer.checkpoint import load_state

STEPS = 8


@pytest.fixture(scope="module")
def temp_dir():
    """A short path: Ray's sockets lie below it."""
    folder = tempfile.mkdtemp(prefix="gt-")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def whole_run(model_folder, questions, temp_dir, tmp_path_factory):
    """Changes for a run with two ranks and everything on."""
    prompts = tmp_path_factory.mktemp("data") / "train.jsonl"
    prompts.write_text(
        "".join(json.dumps({"prompt": q, "answer": a}) + "\n" for q, a in questions.items())
    )
    return {
        "data.train": str(prompts),
        "cluster.temp_dir": temp_dir,
        "policy.model": {
            "kind": "pretrained",
            "name": str(model_folder),
            "use_chat_template": False,
        },
        "policy.data_parallel": 2,
        "policy.dynamic_batching.enabled": True,
        "policy.dynamic_batching.max_tokens_per_microbatch": 96,
        "grpo.num_steps": STEPS,
        "grpo.num_generations_per_prompt": 8,
        "grpo.dynamic_sampling": {"enabled": True, "max_batches": 2, "when_short": "proceed"},
        "validation.every_steps": 2,
        "checkpointing": {"every_steps": 1, "keep_last": 2},
    }


@pytest.fixture(scope="module")
def finished(configure, whole_run, tmp_path_factory):
    """A run that nothing disturbed."""
    output = tmp_path_factory.mktemp("runs")
    result = grpo_trainer.train(configure({**whole_run, "run.output": str(output)}))
    assert not ray.is_initialized()
    return result


def lasting(history):
    """The metrics that do not depend on the clock."""
    return [
        {name: value for name, value in record.items() if name not in ("seconds", "tokens_per_s")}
        for record in history
    ]


def test_a_run_with_a_model_from_disk_writes_what_it_promises(finished):
    assert [record["step"] for record in finished.history] == [*range(1, STEPS + 1)]
    assert any("loss" in record for record in finished.history)
    assert ["validation_reward" in record for record in finished.history] == [False, True] * 4
    assert finished.rewards == [record["reward"] for record in finished.history]
    folder = finished.folder
    assert sorted(path.name for path in folder.iterdir()) == [
        ".lock",
        "checkpoints",
        "config.json",
        "metrics.jsonl",
        "reward.png",
    ]
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == finished.history
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert names == [f"step-{STEPS - 1:06d}", f"step-{STEPS:06d}"]


def test_a_finished_run_is_resumed_without_doing_anything(finished):
    before = {path: path.stat().st_mtime_ns for path in finished.folder.rglob("*")}
    assert grpo_trainer.resume(finished.folder) == finished
    assert {path: path.stat().st_mtime_ns for path in finished.folder.rglob("*")} == before


class Killed:
    """A run of the command line, one of whose processes is killed in the middle of it."""

    def __init__(self, command_line, config, victim):
        self.process = command_line.start("train", "--config", config)
        try:
            self.folder = Path(self.wait_for("run folder").split()[-1])
            family = psutil.Process(self.process.pid).children(recursive=True)
            [target] = [
                child for child in family if " ".join(child.cmdline()).startswith(f"ray::{victim}")
            ][:1]
            self.wait_for("step    2")
            target.send_signal(signal.SIGKILL)
            started = time.monotonic()
            self.stdout, self.stderr = self.process.communicate(timeout=60)
            self.seconds = time.monotonic() - started
        finally:
            self.process.kill()
        _, self.left = psutil.wait_procs(family, timeout=10)

    def wait_for(self, start):
        """The next line that begins so; the test's timeout bounds the wait."""
        for line in self.process.stdout:
            if line.startswith(start):
                return line
        raise AssertionError(f"the run ended before {start!r}: {self.process.stderr.read()}")


def check_end(killed, name):
    """One error that names the dead process, no processes, and only whole files."""
    assert killed.process.returncode == 1
    assert killed.stderr.startswith("error: "), killed.stderr
    assert killed.stderr.count("\n") == 1, killed.stderr
    assert name in killed.stderr
    assert killed.seconds < 20
    assert not killed.left
    checkpoints = list((killed.folder / "checkpoints").iterdir())
    assert checkpoints
    for checkpoint in checkpoints:
        assert load_state(checkpoint).step >= 1
    lines = (killed.folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [*range(1, len(lines) + 1)]
    assert not [path for path in killed.folder.rglob("*") if "partial" in path.name]


@pytest.mark.timeout(400)
def test_a_run_cut_short_by_a_dead_generation_worker_goes_on_as_if_nothing_had_been(
    finished, command_line, config_file, whole_run
):
    killed = Killed(command_line, config_file(whole_run), "GenerationWorker")
    check_end(killed, "error: generation worker died during ")
    resumed = grpo_trainer.resume(killed.folder)
    assert lasting(resumed.history) == lasting(finished.history)
    for name in ("model/model.safetensors", "optimizer.safetensors"):
        ours, theirs = (
            (run.folder / "checkpoints" / f"step-{STEPS:06d}" / name).read_bytes()
            for run in (resumed, finished)
        )
        assert ours == theirs, name
    lines = (killed.folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == resumed.history


@pytest.mark.parametrize(
    ("victim", "ranks", "name"),
    [
        # integration/test_traced_step.py kills a rank too.
        pytest.param("PolicyWorker", 2, "error: policy worker ", marks=pytest.mark.long),
        # dataplane-tq's tests kill it beside every operation.
        pytest.param(
            "TransferQueueController",
            1,
            "TransferQueueController is dead",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_dead_process_ends_the_run_in_one_error_that_names_it(
    command_line, config_file, temp_dir, victim, ranks, name
):
    config = config_file(
        {
            "cluster.temp_dir": temp_dir,
            "policy.data_parallel": ranks,
            "grpo.num_steps": 500,
            "validation.every_steps": 0,
            "checkpointing": {"every_steps": 1, "keep_last": 2},
        }
    )
    killed = Killed(command_line, config, victim)
    check_end(killed, name)
    assert killed.stderr.count("died") + killed.stderr.count("is dead") >= 1


def test_sigterm_ends_a_run_after_its_step_with_a_checkpoint_and_status_0(
    command_line, config_file, temp_dir
):
    config = config_file(
        {
            "cluster.temp_dir": temp_dir,
            "grpo.num_steps": 500,
            "validation.every_steps": 0,
            "checkpointing": {"every_steps": 100, "keep_last": 2},
        }
    )
    process = command_line.start("train", "--config", config)
    try:
        for line in process.stdout:
            if line.startswith("run folder"):
                folder = Path(line.split()[-1])
            if line.startswith("step    2"):
                break
        process.send_signal(signal.SIGTERM)
        told, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, errors) == (0, "")
    done = len((folder / "metrics.jsonl").read_text().splitlines())
    assert f"stopped after step {done}; to go on: grpo-trainer resume {folder}" in told
    [checkpoint] = (folder / "checkpoints").iterdir()
    assert load_state(checkpoint).step == done


def test_sigterm_after_the_last_checkpoint_lets_the_run_end_with_status_0(
    command_line, config_file, temp_dir
):
    config = config_file({"cluster.temp_dir": temp_dir, "grpo.num_steps": 1})
    process = command_line.start("train", "--config", config)
    try:
        for line in process.stdout:
            if line.startswith("run folder"):
                folder = Path(line.split()[-1])
                break
        deadline = time.monotonic() + 60
        while not (folder / "checkpoints" / "step-000001").exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        told, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, errors) == (0, "")
    assert "stopped after" not in told
    assert (folder / "reward.png").exists()


def test_sigterm_while_ray_starts_ends_the_run_with_143_and_leaves_no_process(
    command_line, config_file, processes_of
):
    folder = tempfile.mkdtemp(prefix="gt-")
    process = command_line.start("train", "--config", config_file({"cluster.temp_dir": folder}))
    try:
        deadline = time.monotonic() + 60
        while not (started := processes_of(f"{folder}/")):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, errors) == (143, "")
    _, left = psutil.wait_procs({*started, *processes_of(f"{folder}/")}, timeout=20)
    assert not left
    shutil.rmtree(folder)
