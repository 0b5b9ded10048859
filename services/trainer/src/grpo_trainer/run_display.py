"""What a run tells about itself while it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any  # Any: metrics of a step

from grpo_trainer.config import TrainerConfig


class RunDisplay:
    """Told about the run's progress; this one shows nothing."""

    def started(self, folder: Path, config: TrainerConfig, done_steps: int) -> None:
        """The processes are up; ``done_steps`` were completed before."""

    def notice(self, text: str) -> None:
        """Something that the user should know, one line; at any time."""

    def phase(self, name: str) -> None:
        """A phase of the current step begins."""

    def finished_step(self, record: dict[str, Any]) -> None:
        """A step is complete; ``record`` is its line of metrics."""
