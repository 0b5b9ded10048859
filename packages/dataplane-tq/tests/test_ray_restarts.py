"""Clients while Ray is restarted, or loses a node."""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
import time
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import psutil
import pytest
import ray
import torch
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from tensordict import TensorDict

from dataplane_core import UnavailableError
from dataplane_tq import TQDataPlaneClient, start_local_ray

pytestmark = pytest.mark.slow

CONFIG = {
    "enabled": True,
    "impl": "transfer_queue",
    "backend": "packed",
    "storage_capacity": 100,
    "num_storage_units": 2,
    "claim_meta_poll_interval_s": 5.0,
    "global_segment_size": 4 << 20,
    "local_buffer_size": 0,
    "ack_timeout_ms": 10_000,
}
QUIET = {"namespace": "dataplane-tq-tests", "logging_level": "ERROR", "log_to_driver": False}
BARE = {"include_dashboard": False, "object_store_memory": 80 << 20}
SOON_S = 5.0

OPERATIONS = {
    "register": lambda client: client.register_partition("q", ["x"], 1, ["train"]),
    "put": lambda client: client.put_samples(["c"], "train", batch(1, 0.0)),
    "get": lambda client: client.get_samples(["a", "b"], "train", ["x"]),
    "claim": lambda client: client.claim_meta("train", "train", ["x"], 1, blocking=False),
    "blocked claim": lambda client: client.claim_meta("train", "train", ["x"], 8, timeout_s=1),
    "count": lambda client: client.inspector.count_samples("train", "train", ["x"]),
    "clear": lambda client: client.clear_samples(["a"], "train"),
    "clear all": lambda client: client.clear_samples(None, "train"),
    "list": lambda client: client.inspector.list_partitions(),
}


def batch(count, value):
    return TensorDict({"x": torch.full((count, 4), value)}, batch_size=[count])


def first_put(client):
    client.register_partition("train", ["x"], 8, ["train"])
    client.put_samples(["a", "b"], "train", batch(2, 1.0))
    assert client.get_samples(["a", "b"], "train", ["x"])["x"].sum() == 8.0


def put_with_a_stuck_report(client, monkeypatch):
    """Put a sample whose report to TransferQueue never finishes."""
    reporting = threading.Event()

    async def never(*arguments):
        reporting.set()
        await asyncio.Event().wait()

    with monkeypatch.context() as patch:
        patch.setattr(client._engine.client.storage_manager, "notify_data_update", never)
        client.put_samples(["late"], "train", batch(1, 0.0))
        assert reporting.wait(10)


def assert_unavailable(client):
    """Check that all operations, started at once, raise `UnavailableError` soon."""
    started = time.monotonic()
    with ThreadPoolExecutor(len(OPERATIONS)) as pool:
        calls = {name: pool.submit(call, client) for name, call in OPERATIONS.items()}
        errors = {name: call.exception(2 * SOON_S) for name, call in calls.items()}
    assert {name: type(error) for name, error in errors.items()} == dict.fromkeys(
        OPERATIONS, UnavailableError
    )
    assert time.monotonic() - started < SOON_S


def shut_ray_down(client):
    """Shut Ray down, and wait until the processes of the data plane have exited.

    Ray does not wait for them, and on a loaded machine they exit seconds later.
    """
    parts = client._engine._actors.values()
    pids = ray.get([part.__ray_call__.remote(lambda _: os.getpid()) for part in parts])
    processes = [psutil.Process(pid) for pid in pids]
    ray.shutdown()
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert not alive


@pytest.fixture
def start_ray():
    with tempfile.TemporaryDirectory(prefix="tq-") as folder:

        def start():
            start_local_ray(num_cpus=2, include_dashboard=False, _temp_dir=folder, **QUIET)

        yield start
        ray.shutdown()


def test_new_client_works_after_a_ray_restart_and_old_one_fails(start_ray, monkeypatch):
    start_ray()
    before = TQDataPlaneClient(CONFIG)
    first_put(before)
    put_with_a_stuck_report(before, monkeypatch)
    shut_ray_down(before)
    assert_unavailable(before)
    assert not ray.is_initialized()
    start_ray()
    _, unfinished = futures.wait(before._reporter._pending, timeout=20)
    assert not unfinished
    assert_unavailable(before)
    after = TQDataPlaneClient(CONFIG)
    first_put(after)
    before.close()
    assert after.get_samples(["a", "b"], "train", ["x"])["x"].sum() == 8.0
    ray.shutdown()
    after.close()
    assert not ray.is_initialized()  # closing starts no other Ray


@pytest.fixture
def nodes():
    """Yield a cluster of two nodes on this machine, and its second node."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, **BARE})
    try:
        second = cluster.add_node(num_cpus=2, **BARE)
        ray.init(address=cluster.address, **QUIET)
        yield cluster, second
    finally:
        ray.shutdown()
        cluster.shutdown()


class Host:
    """Ray actor that hosts an attached client on a given node."""

    def __init__(self, config):
        self.client = TQDataPlaneClient(config, bootstrap=False)

    def put(self, ids, value):
        self.client.put_samples(ids, "train", batch(len(ids), value))

    def get(self, ids):
        return self.client.get_samples(ids, "train", ["x"])["x"][:, 0].tolist()


@pytest.mark.long
def test_rows_are_read_on_every_node_until_a_node_is_lost(nodes):
    cluster, second = nodes
    with TQDataPlaneClient(CONFIG) as here:
        put_and_get_on_both(here, CONFIG, second)
    config = {**CONFIG, "packed_transport": "tcp"}
    with TQDataPlaneClient(config) as here:
        put_and_get_on_both(here, config, second)
        remove(cluster, second)
        until_noticed(here)
        assert_unavailable(here)


def remove(cluster, node):
    """Remove a node and kill its workers, which Ray's simulated nodes leave running."""
    (raylet,) = node.all_processes["raylet"]
    processes = psutil.Process(raylet.process.pid).children(recursive=True)
    cluster.remove_node(node, allow_graceful=False)
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=SOON_S)


def until_noticed(client):
    """Wait until an operation that needs nothing of the lost node fails."""
    deadline = time.monotonic() + SOON_S
    error = None
    while error is None and time.monotonic() < deadline:
        try:
            client.inspector.list_partitions()
        except UnavailableError as raised:
            error = raised
    assert "DataPlanePackedUnit" in str(error)


def put_and_get_on_both(here, config, second):
    """Put with a client on each node; then each client reads the rows of both."""
    there = (
        ray.remote(Host)
        .options(
            num_cpus=0.1,
            scheduling_strategy=NodeAffinitySchedulingStrategy(second.node_id, soft=False),
        )
        .remote(config)
    )
    here.register_partition("train", ["x"], 8, ["train"])
    here.put_samples(["a", "b"], "train", batch(2, 1.0))
    ray.get(there.put.remote(["c", "d"], 2.0), timeout=180)
    units = here.inspector.list_storage()
    assert len({unit.node for unit in units}) == 2
    assert all(unit.used > 0 for unit in units)  # each node stores its own rows
    ids, values = ["d", "a", "c", "b"], [2.0, 1.0, 2.0, 1.0]
    assert here.get_samples(ids, "train", ["x"])["x"][:, 0].tolist() == values
    assert ray.get(there.get.remote(ids), timeout=180) == values
