"""The package's public names, and what it costs to import."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version

import pytest

import grpo_trainer


def test_the_public_names_are_documented() -> None:
    assert all(getattr(grpo_trainer, name).__doc__ for name in grpo_trainer.__all__)


HEAVY = {"torch", "ray", "transformers", "matplotlib", "tensordict", "rich.live"}


@pytest.mark.parametrize(
    ("module", "allowed"),
    [
        ("grpo_trainer", set()),
        ("grpo_trainer.cli", {"rich.live"}),
        ("grpo_trainer.rollout.environment", {"ray", "torch"}),  # of a small process of Ray
        ("grpo_trainer.rollout.remote_generation", {"ray"}),
    ],
)
def test_what_must_start_fast_imports_little(module: str, allowed: set[str]) -> None:
    code = f"import sys, {module}; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert not (HEAVY - allowed) & set(loaded.stdout.split())


def test_the_command_prints_its_version_and_an_example(command_line) -> None:
    assert command_line.run("--version").stdout == f"grpo-trainer {version('grpo-trainer')}\n"
    for command in ((), ("train",), ("resume",), ("schema",)):
        shown = command_line.run(*command, "--help").stdout
        assert "Example: grpo-trainer" in shown
        assert max(map(len, shown.splitlines())) <= 80
