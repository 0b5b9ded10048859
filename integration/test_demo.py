"""`make demo` learns; `make demo`, `make trace` and `make admin` listen on loopback only."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import IO

import pytest
from integration.environments import ROOT, UV
from integration.lean_ray import LEAN, LEAN_ENVIRONMENT
from integration.listening import Listener, listeners
from integration.waiting import wait_until

SCRIPTS = Path(sys.executable).parent
TIMEOUT_S = 300.0

STEPS = 18
"""Fewer than a third of the demo's steps, in which the reward rises from 0.05 to 0.7."""
PARTS = {
    "gcs_server",
    "raylet",
    "ray::DashboardAgent",
    "ray::RuntimeEnvAgent",
    "ray::TransferQueueController",
    "ray::DirectoryActor",
    "ray::UnitActor",
    "ray::PolicyWorker",
    "ray::GenerationWorker",
    "ray::RolloutActor",
    "ray::VerifierEnvironment",
}


@contextmanager
def running(command: list[str], folder: Path, out: IO[str]) -> Iterator[subprocess.Popen[str]]:
    """Run a process in ``folder`` during the block, and terminate it afterwards."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, **LEAN_ENVIRONMENT, "COLUMNS": "120"},
        stdout=out,
        stderr=out,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    finally:
        process.kill()
        process.wait()


def listening_in_the_first_step(process: subprocess.Popen[str], folder: Path) -> list[Listener]:
    """Return the run's listening sockets after its first step has used all of its parts."""

    def has_stepped() -> bool:
        assert process.poll() is None, (folder / "log").read_text()
        return any(path.stat().st_size for path in folder.glob("**/metrics.jsonl"))

    wait_until(has_stepped, TIMEOUT_S, state=(folder / "log").read_text)
    return listeners(process.pid)


@pytest.mark.timeout(900)
def test_demo_raises_the_mean_reward(tmp_path: Path) -> None:
    command = [*LEAN, str(SCRIPTS / "grpo-trainer"), "train"]
    command += ["--output", str(tmp_path), "--set", f"grpo.num_steps={STEPS}"]
    with (tmp_path / "log").open("w") as log, running(command, tmp_path, log) as process:
        assert process.wait(850) == 0, (tmp_path / "log").read_text()
    [run] = (tmp_path / "demo").iterdir()
    history = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rewards = [record["reward"] for record in history]
    assert len(rewards) == STEPS
    assert fmean(rewards[:5]) <= 0.3
    assert fmean(rewards[-5:]) >= 0.5
    assert (run / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert "last five steps" in (tmp_path / "log").read_text()


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("command", "more"),
    [
        # Through `uv run`, because Ray behaves differently below it.
        ([UV, "--project", str(ROOT), "run", "--no-sync", "grpo-trainer", "train"], set()),
        ([str(SCRIPTS / "grpo-trace"), "--steps", "1000"], {"grpo-trace"}),
        (
            [sys.executable, str(ROOT / "integration" / "admin_demo.py"), "--port", "0"],
            {"dataplane-admin"},
        ),
    ],
    ids=["demo", "trace", "admin"],
)
def test_demos_listen_on_loopback_only(command: list[str], more: set[str], tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log, running(command, tmp_path, log) as process:
        listening = listening_in_the_first_step(process, tmp_path)
    # A working actor's process is named after the method that it runs.
    assert PARTS | more <= {listener.process.partition(".")[0] for listener in listening}
    assert [each for each in listening if not each.is_loopback] == []
