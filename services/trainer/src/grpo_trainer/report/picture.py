"""Chart of a run: reward over steps."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any  # Any: metrics of a step

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from grpo_trainer.atomic_file import write_atomically

_BLUE, _ORANGE, _GREY = "#2f6fde", "#d9730d", "#6b7280"


def save_reward_picture(history: Sequence[Mapping[str, Any]], path: Path, *, title: str) -> None:
    """Draw the mean reward of every step, and of the held-out prompts after validation.

    Args:
        history: metrics of the steps, with ``step``, ``reward`` and sometimes
            ``validation_reward``.
        path: PNG to write. The reward axis spans 0 to 1, and more if a reward is outside.
        title: heading.
    """
    figure = Figure(figsize=(8, 4.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps = [record["step"] for record in history]
    rewards = [record["reward"] for record in history]
    axes.plot(steps, rewards, color=_BLUE, linewidth=2, label="training prompts")
    checked = [record for record in history if "validation_reward" in record]
    held_out = [record["validation_reward"] for record in checked]
    if checked:
        axes.plot(
            [record["step"] for record in checked],
            held_out,
            "o",
            color=_ORANGE,
            markersize=7,
            label="held-out prompts",
        )
    low, high = min([0.0, *rewards, *held_out]), max([1.0, *rewards, *held_out])
    margin = 0.02 * (high - low)
    axes.set_ylim(low - margin, high + margin)
    axes.set_xlim(left=0, right=max([1, *steps]) + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("step")
    axes.set_ylabel("mean reward")
    axes.set_title(title, loc="left", fontsize=11, color="#111827", parse_math=False)
    axes.grid(axis="y", color="#e5e7eb")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=_GREY)
    axes.legend(frameon=False, loc="lower right")
    png = io.BytesIO()
    figure.savefig(png, format="png")
    write_atomically(path, png.getvalue())
