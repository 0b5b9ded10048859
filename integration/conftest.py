"""A Ray per module of integration tests, and configurations derived from the demo's."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml

from grpo_trainer.config import DEMO_CONFIG, TrainerConfig, check_config


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="it-") as folder:
        ray.init(
            num_cpus=8,
            include_dashboard=False,
            _temp_dir=folder,
            namespace="integration",
            logging_level="ERROR",
            log_to_driver=False,
        )
        yield
        ray.shutdown()


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., TrainerConfig]:
    """Builds the demo's configuration with dotted keys replaced."""

    def make(**changes: Any) -> TrainerConfig:
        raw = copy.deepcopy(yaml.safe_load(DEMO_CONFIG.read_text()))
        small = {
            "run.output": str(tmp_path / "runs"),
            "validation.every_steps": 0,
            "checkpointing.every_steps": 0,
            "grpo.num_steps": 1,
            "grpo.dynamic_sampling.enabled": False,
        }
        replaced = {**small, **{key.replace("__", "."): value for key, value in changes.items()}}
        for key, value in replaced.items():
            *parents, leaf = key.split(".")
            node = raw
            for parent in parents:
                node = node[parent]
            assert leaf in node, key
            node[leaf] = value
        return check_config(raw, source="test")

    return make
