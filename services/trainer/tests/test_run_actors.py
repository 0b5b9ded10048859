"""A run that joins a cluster waits until its nodes have what the processes ask for."""

from __future__ import annotations

import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import ray
from ray.cluster_utils import Cluster

from grpo_trainer.errors import WorkerError
from grpo_trainer.run_actors import wait_for_room

PLACED = {"cluster.placement.policy": {"trainers": 0.1}}


@pytest.fixture(scope="module")
def machines():
    """A cluster of one node, to which others may be added."""
    folder = tempfile.mkdtemp(prefix="gr-")
    made = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 4, "object_store_memory": 80 << 20, "temp_dir": folder},
    )
    ray.init(address=made.address, logging_level="ERROR", log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow
@pytest.mark.parametrize(("timeout_s", "waited"), [(0.0, ""), (1.5, " after 1.5 s")])
def test_a_cluster_that_stays_too_small_is_refused_and_how_long_that_took(
    machines, configure, timeout_s, waited
):
    begun = time.monotonic()
    with pytest.raises(WorkerError) as refusal:
        wait_for_room(configure(PLACED), timeout_s=timeout_s)
    assert time.monotonic() - begun >= timeout_s
    assert str(refusal.value) == (
        "cluster.placement and data_plane.unit_resources: the run's processes need 0.1 of the "
        f"resource trainers, Ray has 0{waited}"
    )


@pytest.mark.slow
def test_a_node_may_join_after_the_driver(machines, configure):
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait_for_room, configure(PLACED), timeout_s=120)
        with pytest.raises(TimeoutError):
            waiting.result(timeout=1)
        machines.add_node(num_cpus=1, resources={"trainers": 1})
        waiting.result(timeout=60)
