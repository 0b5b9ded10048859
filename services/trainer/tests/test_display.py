"""A run shows a line per step without a terminal, a live panel with one, and tables at the end."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from grpo_trainer.display import TerminalDisplay, print_summary, sparkline


def record(step, **more):
    return {
        "step": step,
        "reward": 0.25 * step,
        "groups": 4,
        "tokens_per_s": 100.0,
        "seconds": {"rollout": 0.5, "train": 0.25},
        **more,
    }


def shown(terminal, width=80):
    return Console(file=io.StringIO(), force_terminal=terminal, width=width)


@given(st.lists(st.floats(-1, 2), max_size=30), st.integers(1, 20))
def test_a_sparkline_has_a_character_for_each_of_the_last_steps(rewards, width):
    assert len(sparkline(rewards, width)) == min(len(rewards), width)


def test_a_sparkline_rises_with_the_reward():
    assert sparkline([0.0, 0.5, 1.0], 10) == " ▄█"
    bars = sparkline([i / 20 for i in range(21)], 30)
    assert list(bars) == sorted(bars, key=" ▁▂▃▄▅▆▇█".index)


def test_without_a_terminal_each_step_is_one_line(configure):
    console = shown(False, width=40)
    display = TerminalDisplay(console)
    folder = Path("runs") / "[bold]a folder with a name that is wider than the console"
    display.started(folder, configure(), 0)
    for step in (1, 2):
        display.phase("rollout")
        display.finished_step(record(step, loss=0.5, validation_reward=0.125))
    display.close()
    lines = console.file.getvalue().splitlines()
    assert lines[0] == f"run folder  {folder}"
    line = "step 1 reward 0.250 groups 4 loss +0.5000 held-out 0.125 0.75 s"
    assert " ".join(lines[1].split()) == line
    assert len(lines) == 3


@pytest.mark.parametrize("terminal", [True, False])
def test_a_notice_is_one_line_as_it_stands(terminal):
    console = shown(terminal, width=40)
    text = "keys of [an older release] that it lacks: cluster.nodes_timeout_s=60.0"
    TerminalDisplay(console).notice(text)
    assert console.file.getvalue() == f"{text}\n"


def test_a_step_without_training_has_no_loss(configure):
    console = shown(False)
    display = TerminalDisplay(console)
    display.started(Path("run"), configure(), 0)
    display.finished_step(record(1))
    assert "loss -" in console.file.getvalue()


def test_a_terminal_shows_the_phase_and_the_last_steps(configure):
    console = shown(True)
    display = TerminalDisplay(console)
    display.started(Path("run"), configure(), 0)
    for step in range(1, 12):
        display.finished_step(record(step, loss=0.5, kl=0.1, clip_fraction=0.02, grad_norm=1.5))
    display.phase("rollout")
    display.close()
    display.close()
    last = console.file.getvalue().rpartition("reward  ")[2]
    assert "rollout" in last
    assert "+0.5000" in last


def test_an_unused_display_closes():
    TerminalDisplay(shown(True)).close()


@pytest.mark.parametrize("steps", [1, 12])
def test_the_summary_compares_both_ends_and_shares_out_the_time(steps):
    console = shown(False, width=100)
    history = [record(step) for step in range(1, steps + 1)]
    history[-1]["validation_reward"] = 0.75
    print_summary(console, history, picture=Path("a/reward.png"))
    text = console.file.getvalue()
    first, last = history[:5], history[-5:]
    assert f"{sum(r['reward'] for r in first) / len(first):.3f}" in text
    assert f"{sum(r['reward'] for r in last) / len(last):.3f}" in text
    assert "0.750" in text
    assert "67%" in text
    assert "33%" in text
    assert "a/reward.png" in text


def test_the_summary_of_a_run_without_steps_can_be_shown():
    print_summary(shown(False), [], picture=Path("reward.png"))
