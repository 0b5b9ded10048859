"""A run that joins a cluster waits until the nodes have the requested resources."""

from __future__ import annotations

import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import ray
from integration.waiting import wait_until
from ray.cluster_utils import Cluster

import grpo_trainer
from grpo_trainer.errors import WorkerError

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def machines():
    """Cluster of one node, to which more can be added."""
    folder = tempfile.mkdtemp(prefix="gr-")
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 4, "object_store_memory": 80 << 20, "temp_dir": folder},
    )
    ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def placed(configure, tmp_path):
    """Configuration of a run whose policy needs nodes that are missing."""
    placement = {"run.output": str(tmp_path), "cluster.placement.policy": {"trainers": 0.1}}
    return lambda timeout_s: configure({**placement, "cluster.nodes_timeout_s": timeout_s})


@pytest.mark.parametrize(("timeout_s", "waited"), [(0.0, ""), (1.5, " after 1.5 s")])
def test_a_cluster_that_stays_too_small_is_refused(machines, placed, timeout_s, waited):
    began = time.monotonic()
    with pytest.raises(WorkerError) as refusal:
        grpo_trainer.train(placed(timeout_s))
    assert time.monotonic() - began >= timeout_s
    assert str(refusal.value) == (
        "cluster.placement and data_plane.unit_resources: the run's processes need 0.1 of the "
        f"resource trainers, Ray has 0{waited}"
    )


def test_a_node_may_join_after_the_driver(machines, placed, accepted):
    lines = []

    def train(display):
        display.lines = lines
        grpo_trainer.train(placed(120), display=display)

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(accepted, train, "starting the data plane")
        wait_until(lambda: lines)
        assert not waiting.done()
        machines.add_node(num_cpus=1, resources={"trainers": 1})
        waiting.result(timeout=60)
