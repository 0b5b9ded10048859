"""Terminal output of a run: progress while it runs, a table at the end.

Without a terminal (a log file, continuous integration) every step is one line instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any  # Any: metrics of a step

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from dataplane_core import DataPlaneError
from grpo_trainer.config.loading import TrainerConfig
from grpo_trainer.errors import ConfigurationError, TrainerError
from grpo_trainer.report.display import RunDisplay

_BARS = " ▁▂▃▄▅▆▇█"
_RECENT = 8


class TerminalDisplay(RunDisplay):
    """Display of a run on ``console``."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._records: list[Mapping[str, Any]] = []
        self._phase = "starting"
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TimeRemainingColumn(),
            console=console,
            expand=True,
        )

    def started(self, folder: Path, config: TrainerConfig, done_steps: int) -> None:
        """Start the display of steps."""
        self._task = self._progress.add_task(
            "steps", total=config.grpo.num_steps, completed=done_steps
        )
        _print_path(self._console, "run folder", folder)
        if self._console.is_terminal:
            self._live = Live(self._render(), console=self._console, refresh_per_second=8)
            self._live.start()

    def notice(self, text: str) -> None:
        """Print the line."""
        self._console.print(Text(text), soft_wrap=True)

    def phase(self, name: str) -> None:
        """Show the step's phase."""
        self._phase = name
        self._refresh()

    def finished_step(self, record: dict[str, Any]) -> None:
        """Show the step's numbers."""
        self._records.append(record)
        self._progress.update(self._task, completed=record["step"])
        if self._live is None:
            self._console.print(_line(record), highlight=False, soft_wrap=True)
        self._refresh()

    def close(self) -> None:
        """Stop the display; the last state stays on the screen."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _refresh(self) -> None:
        if self._live is not None:
            self._live.update(self._render())

    def _render(self) -> Group:
        table = _steps_table(self._records[-_RECENT:])
        rewards = [float(record["reward"]) for record in self._records]
        width = max(10, self._console.width - 12)
        line = Text.assemble("reward  ", (sparkline(rewards, width), "bold blue"))
        status = Text(f"now     {self._phase}", style="dim")
        return Group(self._progress, Panel(Group(line, status, Text(), table), border_style="dim"))


@contextmanager
def exit_on_user_error(close: Callable[[], None] = lambda: None) -> Iterator[None]:
    """End a command with one message for an error that a user can cause or fix.

    The exit status is 2 for a `ConfigurationError`, else 1; an interrupt ends it with 130.
    ``close`` is called first.
    """
    console = Console(stderr=True)
    try:
        try:
            yield
        finally:
            close()
    except (TrainerError, DataPlaneError) as error:
        message = Text.assemble(("error: ", "bold red"), str(error))
        console.print(message, soft_wrap=True)
        raise typer.Exit(2 if isinstance(error, ConfigurationError) else 1) from None
    except KeyboardInterrupt:
        console.print("interrupted")
        raise typer.Exit(130) from None


def sparkline(rewards: Sequence[float], width: int) -> str:
    """Return a character for each of the last ``width`` steps; a reward of 1 is a full block."""
    top = len(_BARS) - 1
    return "".join(_BARS[min(top, max(0, round(reward * top)))] for reward in rewards[-width:])


@dataclass(frozen=True)
class Summary:
    """Summary of a run's steps; a mean without steps is None.

    Attributes:
        first_reward: mean reward of the first five steps.
        last_reward: mean reward of the last five steps.
        validation_reward: reward of the last validation; None without one.
        seconds: mean seconds of each phase per step.
    """

    first_reward: float | None
    last_reward: float | None
    validation_reward: float | None
    seconds: Mapping[str, float]


def summary_of(history: Sequence[Mapping[str, Any]]) -> Summary:
    """Return the summary of the steps with the metrics ``history``."""
    rewards = [float(record["reward"]) for record in history]
    phases: dict[str, float] = {}
    for record in history:
        for name, seconds in record["seconds"].items():
            phases[name] = phases.get(name, 0.0) + seconds / len(history)
    validated = [record["validation_reward"] for record in history if "validation_reward" in record]
    return Summary(
        _mean(rewards[:5]), _mean(rewards[-5:]), validated[-1] if validated else None, phases
    )


def print_summary(console: Console, history: Sequence[Mapping[str, Any]], *, picture: Path) -> None:
    """Print the reward of the first and last steps, and the time of each phase."""
    summary = summary_of(history)
    total = sum(summary.seconds.values()) or 1.0
    result = Table(title="result", title_justify="left", title_style="bold")
    result.add_column("mean reward")
    result.add_column("", justify="right")
    result.add_row("first five steps", _reward(summary.first_reward))
    result.add_row("last five steps", _reward(summary.last_reward), style="bold")
    if summary.validation_reward is not None:
        result.add_row("held-out prompts, last validation", _reward(summary.validation_reward))
    times = Table(title="time", title_justify="left", title_style="bold")
    times.add_column("phase")
    times.add_column("ms per step", justify="right")
    times.add_column("share", justify="right")
    for name, seconds in summary.seconds.items():
        times.add_row(name, f"{1000 * seconds:.0f}", f"{seconds / total:.0%}")
    console.print(result)
    console.print(times)
    _print_path(console, "picture", picture)


def _print_path(console: Console, what: str, path: Path) -> None:
    # Not wrapped, so that it can be copied, and not parsed as markup.
    console.print(Text.assemble(f"{what}  ", (str(path), "bold")), soft_wrap=True)


def _steps_table(records: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    columns = ("step", "reward", "groups", "loss", "kl", "clipped", "grad norm", "tokens/s", "s")
    for name in columns:
        table.add_column(name, justify="right")
    for record in records:
        table.add_row(
            str(record["step"]),
            f"{record['reward']:.3f}",
            f"{record['groups']:.0f}",
            _optional(record, "loss", "+.4f"),
            _optional(record, "kl", ".4f"),
            _optional(record, "clip_fraction", ".1%"),
            _optional(record, "grad_norm", ".2f"),
            _optional(record, "tokens_per_s", ".0f"),
            f"{sum(record['seconds'].values()):.2f}",
        )
    return table


def _line(record: Mapping[str, Any]) -> str:
    seconds = sum(record["seconds"].values())
    parts = [f"step {record['step']:4d}", f"reward {record['reward']:.3f}"]
    parts += [f"groups {record['groups']:3.0f}", f"loss {_optional(record, 'loss', '+.4f')}"]
    if "validation_reward" in record:
        parts.append(f"held-out {record['validation_reward']:.3f}")
    return "  ".join([*parts, f"{seconds:.2f} s"])


def _optional(record: Mapping[str, Any], name: str, form: str) -> str:
    return format(record[name], form) if name in record else "-"


def _reward(mean: float | None) -> str:
    return "-" if mean is None else f"{mean:.3f}"


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
