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
    AsyncAdder,
    CharTokenizer,
    Local,
    config,
    roll_out,
)

from dataplane_core import DP_TRAIN_FIELDS, InMemoryDataPlaneClient  # noqa: E402  # likewise
from rollout_actor import (  # noqa: E402  # likewise
    SyncRolloutActor,
    run_async_multi_turn_rollout,
    run_multi_turn_rollout,
)


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


@pytest.fixture(params=["sync", "async"])
def rollout(request):
    """Return a function that runs a rollout; its attribute ``generator`` is the last backend."""
    form, backend = {
        "sync": (run_multi_turn_rollout, Adder),
        "async": (run_async_multi_turn_rollout, AsyncAdder),
    }[request.param]

    def run(batch, env=None, *, max_new_tokens=20, **options):
        run.generator = backend(max_new_tokens=max_new_tokens)
        return roll_out(form, run.generator, batch, env, max_new_tokens=max_new_tokens, **options)

    return run


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
