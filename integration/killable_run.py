"""A training run in a separate process that tests and benchmarks kill and resume.

``python -m integration.killable_run FOLDER`` is that process. It starts the run of ``config.json``
in FOLDER, or resumes it once it has a checkpoint, and appends to ``record.jsonl`` what it did. With
``--lean``, its Ray starts faster (`integration.lean_ray`).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any  # Any: metrics of a step

import psutil
from integration.lean_ray import start_lean_rays

_ROOT = Path(__file__).parents[1]
_PROGRAM = ("-m", "integration.killable_run", "--lean")
_CONFIG, _RECORD = "config.json", "record.jsonl"

EVERYTHING, DRIVER = "everything", "driver"
"""Victims of `KillableRun.kill` that have no process title."""


class KillableRun:
    """Run whose driver is a child of this process, with a separate Ray cluster.

    Args:
        folder: a new folder; the run's folder, its configuration and its record are below it.
        config: the run's configuration; its ``run.output`` must be ``folder``.
        program: arguments of Python that start the driver's program; FOLDER is added.

    Attributes:
        process: the driver that was started last.
    """

    def __init__(self, folder: Path, config: str, *program: str) -> None:
        self._folder, self._program = folder, program or _PROGRAM
        self._families: list[psutil.Process] = []
        self._logs: list[Path] = []
        (folder / _CONFIG).write_text(config)
        (folder / _RECORD).touch()
        self.start()

    def start(self) -> None:
        """Start a driver, which resumes the run if it has a checkpoint."""
        self._logs.append(self._folder / f"driver-{len(self._logs)}.log")
        with self._logs[-1].open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, *self._program, self._folder],
                cwd=_ROOT,
                env={**os.environ, "HF_HUB_OFFLINE": "1"},
                stdout=log,
                stderr=log,
            )

    @property
    def run_folder(self) -> Path:
        """The folder that the trainer made."""
        [folder] = self._folder.glob("*/*/config.json")
        return folder.parent

    @property
    def checkpoints(self) -> dict[int, Path]:
        """The run's complete checkpoints by step."""
        return {int(path.name.rpartition("-")[2]): path for path in _checkpoints(self._folder)}

    def events(self) -> list[dict[str, Any]]:
        """Return what all drivers recorded, and the kills; a line that a kill cut is left out."""
        events = []
        for line in (self._folder / _RECORD).read_text().splitlines():
            with suppress(json.JSONDecodeError):
                events.append(json.loads(line))
        return events

    def log(self) -> str:
        """Return the end of the last driver's output."""
        return self._logs[-1].read_text(errors="replace")[-4000:]

    def kill(self, victim: str) -> bool:
        """Kill a process of the run with SIGKILL; return False if there is none.

        Args:
            victim: `EVERYTHING`, `DRIVER`, or the start of the process's name. If several match,
                the youngest one is killed.
        """
        family = self._family()
        driver = psutil.Process(self.process.pid)
        if victim == EVERYTHING:
            victims = [driver, *family]
        elif victim == DRIVER:
            victims = [driver]
        else:
            victims = [each for each in family if _title(each).startswith(victim)][-1:]
        self._kill_all(victims)
        if victims:
            _append(self._folder, "kill", victim=victim)
        return bool(victims)

    def _family(self) -> list[psutil.Process]:
        """Return the processes that the driver started, directly or not."""
        try:
            family = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        self._families += family
        return family

    def close(self) -> None:
        """Kill the remaining processes of the run and of its earlier drivers."""
        family = self._family()
        self.process.kill()
        self.process.wait()
        self._kill_all([*family, *self._families])

    def _kill_all(self, processes: list[psutil.Process]) -> None:
        for each in processes:  # psutil refuses an id that another process got meanwhile
            with suppress(psutil.NoSuchProcess):
                each.send_signal(signal.SIGKILL)


def _checkpoints(folder: Path) -> list[Path]:
    return [*folder.glob("*/*/checkpoints/step-*")]


def _append(folder: Path, event: str, **facts: Any) -> None:
    """Append a line to the record, in one write: what was written survives a kill."""
    line = json.dumps({"event": event, "time": time.time(), **facts})
    with (folder / _RECORD).open("ab", buffering=0) as file:
        file.write(b"\n" + line.encode())  # after a line that a kill cut, too


def _title(process: psutil.Process) -> str:
    with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
        command = process.cmdline()
        return command[0].rpartition("/")[2] if command else ""
    return ""


def trained_samples(events: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the ids of the samples that all steps trained.

    A step that was done again after a resume replaces the earlier one, whose weights are lost.
    """
    steps = {event["step"]: event["sample_ids"] for event in events if event["event"] == "step"}
    for ids in steps.values():
        yield from ids


def main(folder: Path) -> None:
    """Train or resume the run in ``folder``, and record its steps."""
    import grpo_trainer

    sample_ids: list[str] = []
    write = partial(_append, folder)

    def observe(name: str, direction: str, value: Any) -> None:
        if direction == "received" and hasattr(value, "sample_ids"):
            sample_ids.extend(value.sample_ids)

    class Recorder(grpo_trainer.RunDisplay):
        def started(self, folder: Path, config: Any, done_steps: int) -> None:
            write("started", done_steps=done_steps)

        def notice(self, text: str) -> None:
            write("notice", text=text)

        def finished_step(self, record: dict[str, Any]) -> None:
            # This runs before the step's checkpoint, so every step in a checkpoint is recorded.
            write("step", step=record["step"], sample_ids=sample_ids)
            sample_ids.clear()

    options: dict[str, Any] = {"display": Recorder(), "observer": observe}
    write("driver_started")
    if _checkpoints(folder):
        [run_folder] = folder.glob("*/*/config.json")
        grpo_trainer.resume(run_folder.parent, **options)
    else:
        config = json.loads((folder / _CONFIG).read_text())
        grpo_trainer.train(grpo_trainer.check_config(config, source=_CONFIG), **options)
    write("completed")


if __name__ == "__main__":
    with start_lean_rays() if "--lean" in sys.argv else nullcontext():
        main(Path(sys.argv[-1]))
