"""Driver of the runs that `integration.benchmarks.crash` kills; it records each rollout.

``python -m integration.benchmarks.crash_driver FOLDER`` does what `integration.killable_run` does.
Its processes also append to ``rollouts.jsonl`` in FOLDER: a generator when it starts and ends a
prompt's group, a generation worker when it has recorded responses in the journal.

Imports internals: the run's parts are replaced by parts that record.
"""

from __future__ import annotations

import json
import os
import sys
import time
import uuid
from pathlib import Path
from typing import Any

from integration.killable_run import main

from dataplane_core import KVBatchMeta
from grpo_trainer.rollout.generator import Generator
from grpo_trainer.rollout.response_journal import ResponseJournal
from grpo_trainer.rollout.worker import GenerationWorker
from grpo_trainer.run import processes
from grpo_trainer.samples.partition import position_of

ROLLOUTS_FILE = "rollouts.jsonl"
_VARIABLE = "CRASH_BENCHMARK_ROLLOUTS"


class RecordedGenerator(Generator):
    """Generator that records its rollouts; its process inherits the driver's environment."""

    def _generate_groups(self, claim: KVBatchMeta) -> list[str]:
        rollout = {
            "id": uuid.uuid4().hex,
            "positions": sorted({position_of(each) for each in claim.sample_ids}),
        }
        _append("begin", rollout)
        filtered = super()._generate_groups(claim)
        _append("end", rollout)
        return filtered


class _NotedJournal(ResponseJournal):
    """Journal that notes when responses to a prompt were recorded."""

    def append(self, position: int, *arguments: Any) -> None:
        super().append(position, *arguments)
        _append("recorded", {"positions": [position]})


class RecordedWorker(GenerationWorker):
    """Generation worker with a `_NotedJournal`."""

    def open_journal(self, folder: str) -> None:
        """Record responses in a journal below ``folder``."""
        self._journal = _NotedJournal(Path(folder))


def _append(event: str, rollout: dict[str, Any]) -> None:
    line = json.dumps({"event": event, "time": time.time(), **rollout}).encode()
    # One write, after a line that a kill may have cut: what was written survives the process.
    with Path(os.environ[_VARIABLE]).open("ab", buffering=0) as file:
        file.write(b"\n" + line)


def record(folder: Path) -> None:
    """Train or resume the run in ``folder``, with recorded generators and workers."""
    os.environ[_VARIABLE] = str(folder / ROLLOUTS_FILE)
    processes.Generator = RecordedGenerator  # type: ignore[misc]
    processes.GenerationWorker = RecordedWorker  # type: ignore[misc]
    main(folder)


if __name__ == "__main__":
    # Not the class of this module, which workers could not import.
    from integration.benchmarks import crash_driver

    crash_driver.record(Path(sys.argv[-1]))
