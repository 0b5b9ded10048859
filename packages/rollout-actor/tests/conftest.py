"""What the tests share: a store in this process, a Ray of their own, and `rollout_doubles`."""

import shutil
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

# Tests are imported by path, so their shared module has to be found.
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
    """The store that actors of this process attach to, with the partition "train"."""
    with InMemoryDataPlaneClient(DP_CFG) as client:
        client.register_partition("train", list(DP_TRAIN_FIELDS), 64, ["train"])
        yield client


@pytest.fixture
def actor_of(store):
    """Makes actors that are shut down with the test."""
    made = []

    def make(generator=None, env=None, **options):
        generator = generator or Adder()
        env = env or Local(Arithmetic())
        actor = SyncRolloutActor(
            generator, CharTokenizer(), {"sum": env}, config(**options), DP_CFG
        )
        made.append(actor)
        return actor

    yield make
    for actor in made:
        actor.shutdown()


@pytest.fixture(scope="module")
def ray_session():
    """A local Ray with two CPUs; actors ask for fractions of one."""
    import ray

    # Ray's sockets live below this folder, and their paths may have about a hundred characters.
    folder = tempfile.mkdtemp(prefix="ra-", dir="/tmp")
    ray.init(
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


# How long an example takes depends on what else the machine does.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
