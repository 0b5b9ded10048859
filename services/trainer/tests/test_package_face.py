"""The package's public names, and what it costs to import."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from typer import Typer
from typer.main import get_command
from typer.testing import CliRunner

import grpo_trainer
from grpo_trainer import RunResult, TrainerError, cli, trace_cli
from grpo_trainer.errors import ConfigurationError


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


def test_the_command_prints_its_version(command_line) -> None:
    assert command_line.run("--version").stdout == f"grpo-trainer {version('grpo-trainer')}\n"


@pytest.mark.parametrize(
    ("command", "app"), [("grpo-trainer", cli.app), ("grpo-trace", trace_cli.app)]
)
def test_every_help_starts_with_an_example_and_cuts_nothing(command: str, app: Typer) -> None:
    for name in ((), *((name,) for name in get_command(app).commands)):
        done = CliRunner(env={"COLUMNS": "80"}).invoke(app, [*name, "--help"])
        beginning, _, options = done.stdout.partition("\u256d")
        assert re.search(f"^ Example: {command} {' '.join(name)}.*\n *\n", beginning, re.M)
        assert max(map(len, done.stdout.splitlines())) <= 80
        assert "\u2026" not in done.stdout
        assert name or "Exit status: 0 on success, 1 on failure, 2 for" in options


@pytest.mark.parametrize(
    ("command", "app", "invalid"),
    [
        ("grpo-trainer", cli.app, "train --config /no/file"),
        ("grpo-trace", trace_cli.app, "--config /no/file"),
    ],
)
def test_shell_completion_lists_the_options_of_an_unfinished_line(
    command: str, app: Typer, invalid: str
) -> None:
    for line in (*get_command(app).commands, invalid):
        words = [command, *line.split(), "--"]
        variables = {"COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
        variables[f"_{command.upper().replace('-', '_')}_COMPLETE"] = "complete_bash"
        done = CliRunner(env=variables).invoke(app, prog_name=command)
        assert (done.exit_code, done.stdout.split()[-1:]) == (0, ["--help"])


def test_json_has_the_summary_and_progress_goes_to_stderr(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = [{"step": 1, "reward": 0.5, "seconds": {"train": 2.0}}]
    result = RunResult(tmp_path, history, was_stopped=True)
    monkeypatch.setattr(cli, "resume", lambda *_, **__: result)
    done = CliRunner().invoke(cli.app, ["resume", str(tmp_path), "--json"])
    assert json.loads(done.stdout) == {
        "folder": str(tmp_path),
        "checkpoint": None,
        "picture": str(tmp_path / "reward.png"),
        "steps": 1,
        "was_stopped": True,
        "first_reward": 0.5,
        "last_reward": 0.5,
        "validation_reward": None,
        "seconds": {"train": 2.0},
    }
    assert "stopped after step 1" in done.stderr


@pytest.mark.parametrize(
    ("error", "status"), [(TrainerError("lost"), 1), (ConfigurationError("no such model"), 2)]
)
def test_a_wrong_configuration_has_status_2_and_a_failure_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: TrainerError, status: int
) -> None:
    def resume(*_: object, **__: object) -> RunResult:
        raise error

    monkeypatch.setattr(cli, "resume", resume)
    done = CliRunner().invoke(cli.app, ["resume", str(tmp_path)])
    assert (done.exit_code, done.stdout, done.stderr) == (status, "", f"error: {error}\n")


@pytest.mark.parametrize("app", [cli.app, trace_cli.app])
def test_unknown_commands_have_status_2(app: Typer) -> None:
    for arguments in (["nothing"], ["--nothing"]):
        assert CliRunner().invoke(app, arguments).exit_code == 2
