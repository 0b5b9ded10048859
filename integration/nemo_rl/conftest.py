"""A Ray whose processes import NeMo-RL's stand-in and the doubles of rollout-actor's tests."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from integration.lean_ray import lean_ray

from dataplane_tq import start_local_ray

__all__ = ["lean_ray"]

FOLDER = Path(__file__).parent
PATHS = [
    str(FOLDER / "standin"),
    str(FOLDER.parents[1] / "packages" / "rollout-actor" / "tests"),
]
sys.path[:0] = PATHS
# Ray's workers are forked from a server that the first Ray of the session starts.
os.environ["PYTHONPATH"] = os.pathsep.join([*PATHS, os.environ.get("PYTHONPATH", "")])


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="nemo-") as folder:
        start_local_ray(
            num_cpus=8,
            include_dashboard=False,
            _temp_dir=folder,
            namespace="nemo-rl",
            logging_level="ERROR",
            log_to_driver=False,
        )
        yield
        ray.shutdown()
