"""Fixtures: a store in this process, a local Ray, and `rollout_doubles`."""

import shutil
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

# Tests are imported by path, so put their shared module on the path.
FOLDER = str(Path(__file__).parent)
sys.path.insert(0, FOLDER)

from rollout_doubles import (  # noqa: E402  # after its folder is on the path
    DP_CFG,
    Adder,
    Arithmetic,
    CharTokenizer,
    Local,
    config,
)

from dataplane_core import DP_TRAIN_FIELDS, InMemoryDataPlaneClient  # noqa: E402  # likewise
from rollout_actor import SyncRolloutActor  # noqa: E402  # likewise


@pytest.fixture
def store():
    """Return the store of this process's actors, with the partition "train"."""
    with InMemoryDataPlaneClient(DP_CFG) as client:
        client.register_partition("train", list(DP_TRAIN_FIELDS), 64, ["train"])
        yield client


@pytest.fixture
def actor_of(store):
    """Return a factory of actors that are shut down with the test."""
    actors = []

    def make(generator=None, env=None, **options):
        generator = generator or Adder()
        env = env or Local(Arithmetic())
        actor = SyncRolloutActor(
            generator, CharTokenizer(), {"sum": env}, config(**options), DP_CFG
        )
        actors.append(actor)
        return actor

    yield make
    for actor in actors:
        actor.shutdown()


@pytest.fixture(scope="module")
def ray_session():
    """Start a local Ray with two CPUs, of which actors need fractions."""
    import ray

    # Ray's sockets live below this folder, and their paths may have about a hundred characters.
    folder = tempfile.mkdtemp(prefix="ra-", dir="/tmp")
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        namespace="rollout-actor-tests",
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": FOLDER}},
        _temp_dir=folder,
    )
    yield ray
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


# The duration of an example depends on the load of the machine.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
