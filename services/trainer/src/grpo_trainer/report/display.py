"""The interface through which a run shows its progress."""

from __future__ import annotations

from pathlib import Path
from typing import Any  # Any: metrics of a step

from grpo_trainer.config.loading import TrainerConfig


class RunDisplay:
    """Receiver of a run's progress; this base class shows nothing."""

    def started(self, folder: Path, config: TrainerConfig, done_steps: int) -> None:
        """Show that the processes have started; ``done_steps`` were completed before."""

    def notice(self, text: str) -> None:
        """Show a line to the user, at any time."""

    def phase(self, name: str) -> None:
        """Show that a phase of the current step begins."""

    def finished_step(self, record: dict[str, Any]) -> None:
        """Show a completed step; ``record`` has its metrics."""
