"""The trainer's command, run in the workspace's environment; its Ray is lean."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

TIMEOUT_S = 500.0
_ROOT = Path(__file__).parents[2]
_BIN = _ROOT / ".venv/bin"
_CONFIG = _ROOT / "services/trainer/src/grpo_trainer/config/demo-vllm.yaml"

SMALL = {
    "cluster.call_timeout_s": 480,  # Ray and vLLM start slowly on a loaded machine
    "policy.generation.start_timeout_s": 450,
    "policy.data_parallel": 2,
    "policy.global_batch_size": 8,
    "policy.micro_batch_size": 4,
    "policy.model.hidden_size": 64,
    "policy.model.num_layers": 1,
    "policy.model.num_heads": 2,
    "grpo.num_prompts_per_step": 4,
    "grpo.num_generations_per_prompt": 4,
    "grpo.dynamic_sampling.enabled": False,
    "grpo.num_steps": 100,
    "validation.every_steps": 0,
    "checkpointing.every_steps": 0,
}


@dataclass
class TrainerRun:
    """A started run.

    Attributes:
        process: process of the driver.
        output: folder of the run's output.
        log: file of the driver's output.
    """

    process: subprocess.Popen[bytes]
    output: Path
    log: Path

    def records(self) -> list[dict[str, Any]]:
        """Return the metrics of the completed steps."""
        lines = [line for file in self.output.rglob("metrics.jsonl") for line in file.open()]
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def wait_for_steps(self, count: int) -> list[dict[str, Any]]:
        """Wait until ``count`` steps are complete, and return their metrics."""
        deadline = time.monotonic() + TIMEOUT_S
        while len(records := self.records()) < count:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{len(records)} of {count} steps; {self.log.read_text()}")
            time.sleep(0.1)
        return records

    def error(self) -> str:
        """Wait for the end of a run that fails, and return its error."""
        assert self.process.wait(TIMEOUT_S) == 1, self.log.read_text()
        return self.log.read_text().partition("error: ")[2]

    def processes(self) -> list[psutil.Process]:
        """Return the processes of the driver, Ray, the actors, the servers and their guards."""
        driver = psutil.Process(self.process.pid)
        guards = [
            process
            for process in psutil.process_iter(["cmdline"])
            if any(str(self.output) in word for word in process.info["cmdline"] or [])
        ]
        processes = {driver, *driver.children(recursive=True), *guards}
        for guard in guards:
            processes.update(guard.children(recursive=True))
        return list(processes)


@contextmanager
def running_trainer(folder: Path, **changes: Any) -> Iterator[TrainerRun]:
    """Run the small demo during the block, and kill its remaining processes afterwards.

    Args:
        folder: folder of output and log.
        changes: values by key, with double underscores for dots.
    """
    values = {**SMALL, **{key.replace("__", "."): value for key, value in changes.items()}}
    command = [str(_BIN / "python"), "-m", "integration.lean_ray", str(_BIN / "grpo-trainer")]
    command += ["train", "--config", str(_CONFIG), "--output", str(folder)]
    for key, value in values.items():
        command += ["--set", f"{key}={json.dumps(value)}"]
    # Without the variables by which these tests run vLLM themselves.
    environment = {key: value for key, value in os.environ.items() if key[:5] != "VLLM_"}
    log = folder / "trainer.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=_ROOT, stdout=output, stderr=output, env=environment
        )
    run = TrainerRun(process, folder, log)
    try:
        yield run
    finally:
        if process.poll() is None:
            processes = run.processes()
            process.kill()
            process.wait()
            wait_until_gone(processes)


def wait_until_gone(processes: Sequence[psutil.Process]) -> None:
    """Wait until all of ``processes`` are gone.

    Raises:
        AssertionError: some remain after `TIMEOUT_S`; they are named and killed.
    """
    _, alive = psutil.wait_procs(processes, TIMEOUT_S)
    remaining = []
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                remaining.append(" ".join(process.cmdline()))
                process.kill()
    assert not remaining, remaining
