"""A Ray per module of integration tests, and configurations derived from the demo's."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from integration.admin_service import admin, browser
from integration.lean_ray import lean_ray, unforked_workers
from integration.temporary_ray import temporary_ray

from grpo_trainer import DEMO_CONFIG, TrainerConfig, check_config

# `make test-vllm` and `make test-verl` run them in separate environments.
collect_ignore = [name for name in ("vllm", "verl") if not importlib.util.find_spec(name)]


__all__ = ["admin", "browser", "lean_ray", "unforked_workers"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with temporary_ray(num_cpus=8, namespace="integration"):
        yield


def configured(folder: Path, changes: Mapping[str, Any]) -> TrainerConfig:
    """Return the demo's configuration for one step that writes below ``folder``.

    ``changes`` maps dotted keys to their new values.
    """
    raw = copy.deepcopy(yaml.safe_load(DEMO_CONFIG.read_text()))
    raw["data_plane"]["transfer_queue_mirror"] = False  # a process less for each run
    small = {
        "run.output": str(folder / "runs"),
        "validation.every_steps": 0,
        "checkpointing.every_steps": 0,
        "grpo.num_steps": 1,
        "grpo.dynamic_sampling.enabled": False,
    }
    for key, value in {**small, **changes}.items():
        *parents, leaf = key.split(".")
        node = raw
        for parent in parents:
            node = node[parent]
        assert leaf in node, key
        node[leaf] = value
    return check_config(raw, source="test")


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., TrainerConfig]:
    """Return `configured` with keyword arguments: double underscores stand for dots."""

    def make(**changes: Any) -> TrainerConfig:
        return configured(
            tmp_path, {key.replace("__", "."): value for key, value in changes.items()}
        )

    return make
