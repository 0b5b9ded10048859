"""A run shows a line per step without a terminal, else a live panel, tables and a chart.

A command in a test has no terminal, so these tests call the display.
So internals are imported.
"""

from __future__ import annotations

import io
import os
from pathlib import Path

import matplotlib.image
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from grpo_trainer.atomic_file import write_atomically
from grpo_trainer.report.picture import save_reward_picture
from grpo_trainer.report.terminal import (
    Summary,
    TerminalDisplay,
    print_summary,
    sparkline,
    summary_of,
)


def record(step, **more):
    return {
        "step": step,
        "reward": 0.25 * step,
        "groups": 4,
        "tokens_per_s": 100.0,
        "seconds": {"rollout": 0.5, "train": 0.25},
        **more,
    }


@pytest.fixture
def show(configure):
    """Show the steps of a run, and return the output."""

    def show(terminal, records, width=80, folder=Path("run")):
        console = Console(file=io.StringIO(), force_terminal=terminal, width=width)
        display = TerminalDisplay(console)
        display.started(folder, configure(), 0)
        for each in records:
            display.phase("rollout")
            display.finished_step(each)
        display.notice("keys of [an older release] that it lacks: cluster.nodes_timeout_s=60.0")
        display.close()
        display.close()
        return console.file.getvalue()

    return show


@given(st.lists(st.floats(-1, 2), max_size=30), st.integers(1, 20))
def test_a_sparkline_has_a_character_for_each_of_the_last_steps(rewards, width):
    assert len(sparkline(rewards, width)) == min(len(rewards), width)
    bars = sparkline(sorted(rewards), width)
    assert list(bars) == sorted(bars, key=" ▁▂▃▄▅▆▇█".index)
    assert sparkline([0.0, 0.5, 1.0], 10) == " ▄█"


def test_without_a_terminal_each_step_is_one_line(show):
    folder = Path("runs") / "[bold]a folder with a name that is wider than the console"
    records = [record(1, loss=0.5, validation_reward=0.125), record(2)]
    first, *steps, notice = show(False, records, 40, folder).splitlines()
    assert first == f"run folder  {folder}"
    assert [" ".join(step.split()) for step in steps] == [
        "step 1 reward 0.250 groups 4 loss +0.5000 held-out 0.125 0.75 s",
        "step 2 reward 0.500 groups 4 loss - 0.75 s",
    ]
    assert notice == "keys of [an older release] that it lacks: cluster.nodes_timeout_s=60.0"


def test_a_terminal_shows_the_phase_and_the_last_steps(show):
    records = [record(step, loss=0.5, kl=0.1, grad_norm=1.5) for step in range(1, 12)]
    last = show(True, records).rpartition("reward  ")[2]
    assert "rollout" in last
    assert "+0.5000" in last


def test_a_terminal_shows_a_step_in_which_no_rollout_ended(show):
    step = record(7)
    del step["tokens_per_s"]
    assert "0.75" in show(True, [step])


@pytest.mark.parametrize("steps", [0, 1, 12])
def test_the_summary_has_first_and_last_rewards_and_phases(steps):
    console = Console(file=io.StringIO(), width=100)
    history = [record(step, validation_reward=step / 16) for step in range(1, steps + 1)]
    print_summary(console, history, picture=Path("a/reward.png"))
    text = console.file.getvalue()
    expected = ["a/reward.png"]
    if steps:
        ends = (history[:5], history[-5:])
        expected += [f"{sum(r['reward'] for r in end) / len(end):.3f}" for end in ends]
        expected += [f"{steps / 16:.3f}", "67%", "33%"]
    assert all(part in text for part in expected)


def test_without_steps_the_summary_has_no_means():
    assert summary_of([]) == Summary(None, None, None, {})


@pytest.mark.parametrize("low", [0.0, -2.0])
@pytest.mark.parametrize("high", [1.0, 10.0])
def test_each_reward_is_in_the_picture(tmp_path, low, high):
    """The lowest and the highest held-out reward have orange pixels."""
    history = [{"step": 1, "reward": 0.5, "validation_reward": low}]
    history += [{"step": 2, "reward": 0.5, "validation_reward": high}]
    save_reward_picture(history, tmp_path / "reward.png", title=r"no formula: $\frac{ b$")
    pixels = matplotlib.image.imread(tmp_path / "reward.png")[..., :3]
    orange = abs(pixels - [0xD9 / 255, 0x73 / 255, 0x0D / 255]).max(2) < 0.02
    plot = orange[:, : pixels.shape[1] * 3 // 4]  # not the legend
    assert orange[: len(orange) // 4].any()
    assert plot[len(plot) // 2 :].any()
    assert [path.name for path in tmp_path.iterdir()] == ["reward.png"]


def test_a_file_is_on_disk_before_it_replaces_another(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    path = tmp_path / "config.json"
    write_atomically(path, b"{}")
    assert path.read_bytes() == b"{}"
    assert synced == [path.stat().st_ino]
