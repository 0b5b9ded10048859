"""The package's public names, what it leans on, and what it costs to import."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import grpo_trainer

SOURCE = Path(grpo_trainer.__file__).parent


def test_the_public_names_are_these() -> None:
    assert grpo_trainer.__all__ == [
        "RunDisplay",
        "RunResult",
        "TrainerConfig",
        "TrainerError",
        "load_config",
        "resume",
        "train",
    ]
    assert all(getattr(grpo_trainer, name).__doc__ for name in grpo_trainer.__all__)


def imports(module: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").split(".")[0])
    return found


def test_the_engines_below_the_packages_are_not_touched() -> None:
    imported = set().union(*(imports(module) for module in SOURCE.glob("*.py")))
    assert not imported & {"transfer_queue", "modelexpress", "nixl", "pickle"}


def test_no_error_is_defined_outside_the_one_tree() -> None:
    for module in SOURCE.glob("*.py"):
        classes = [
            n for n in ast.walk(ast.parse(module.read_text())) if isinstance(n, ast.ClassDef)
        ]
        assert module.name == "errors.py" or not any(c.name.endswith("Error") for c in classes)


HEAVY = {"torch", "ray", "transformers", "matplotlib", "tensordict", "rich.live"}


@pytest.mark.parametrize(
    ("module", "allowed"),
    [
        ("grpo_trainer", set()),
        ("grpo_trainer.cli", {"rich.live"}),
        ("grpo_trainer.inputs", {"transformers"}),
        ("grpo_trainer.environment", {"torch"}),
        ("grpo_trainer.ray_generation", {"ray"}),
    ],
)
def test_what_must_start_fast_imports_little(module: str, allowed: set[str]) -> None:
    code = f"import sys, {module}; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert not (HEAVY - allowed) & set(loaded.stdout.split())
