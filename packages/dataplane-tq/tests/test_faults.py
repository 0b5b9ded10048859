"""A killed part gives a typed error within seconds; capacity is exact; closing leaves nothing."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import ray
import torch
from tensordict import TensorDict

from dataplane_core import CapacityExceeded, UnavailableError
from dataplane_tq import TQDataPlaneClient, topology


def batch(count):
    return TensorDict({"x": torch.ones(count, 4)}, batch_size=[count])


@pytest.fixture
def store(cluster, config):
    """A TransferQueue of its own, before the session's one is started or after it ended."""
    config["storage_capacity"] = 8
    client = TQDataPlaneClient(config)
    client.register_partition("train", ["x"], 8, ["train"])
    client.put_samples(["a", "b"], "train", batch(2))
    yield client
    client.close()


OPERATIONS = {
    "put": lambda client: client.put_samples(["c"], "train", batch(1)),
    "get": lambda client: client.get_samples(["a", "b"], "train", ["x"]),
    "claim": lambda client: client.claim_meta("train", "train", ["x"], 8, timeout_s=30),
    "check": lambda client: client.check_consumption_status("train", ["train"]),
    "clear": lambda client: client.clear_samples(["a", "b"], "train"),
}


def pid_of(actor):
    return ray.get(actor.__ray_call__.remote(lambda self: os.getpid()))


@pytest.mark.parametrize(
    ("part", "unaffected"), [(topology.CONTROLLER, set()), (topology.DIRECTORY, {"get"})]
)
def test_a_killed_part_ends_every_operation_that_needs_it_with_a_typed_error_within_seconds(
    store, part, unaffected
):
    os.kill(pid_of(ray.get_actor(part, namespace=topology.NAMESPACE)), signal.SIGKILL)
    with ThreadPoolExecutor(len(OPERATIONS)) as pool:
        started = time.monotonic()
        running = {name: pool.submit(call, store) for name, call in OPERATIONS.items()}
        for name, operation in running.items():
            error = operation.exception(timeout=15)
            expected = type(None) if name in unaffected else UnavailableError
            assert isinstance(error, expected), (name, error)
        assert time.monotonic() - started < 10


def test_a_killed_storage_unit_ends_reads_and_writes_with_a_typed_error(store):
    unit = ray.get_actor("TransferQueueStorageUnit#0", namespace=topology.NAMESPACE)
    other = ray.get_actor("TransferQueueStorageUnit#1", namespace=topology.NAMESPACE)
    for actor in (unit, other):
        os.kill(pid_of(actor), signal.SIGKILL)
    with ThreadPoolExecutor(2) as pool:
        running = {name: pool.submit(OPERATIONS[name], store) for name in ("put", "get")}
        for name, operation in running.items():
            error = operation.exception(timeout=15)
            assert isinstance(error, UnavailableError), (name, error)
            assert "TransferQueueStorageUnit" in str(error)


def test_attaching_without_a_bootstrap_ends_at_the_deadline(cluster, config):
    config["ack_timeout_ms"] = 300
    with pytest.raises(UnavailableError, match="bootstrap=True on the driver"):
        TQDataPlaneClient(config, bootstrap=False)


def test_closing_the_owner_leaves_no_actor_behind(cluster, config):
    client = TQDataPlaneClient(config)
    client.close()
    for name in (topology.CONTROLLER, topology.DIRECTORY, "TransferQueueStorageUnit#0"):
        with pytest.raises(ValueError, match=name):
            ray.get_actor(name, namespace=topology.NAMESPACE)


def test_capacity_is_exact_and_a_waiting_put_goes_on_when_room_is_made(store, config):
    config["ack_timeout_ms"] = 100
    with (
        TQDataPlaneClient(config, bootstrap=False) as hasty,
        pytest.raises(CapacityExceeded, match="7 new samples, 2 of 8 held"),
    ):
        hasty.put_samples(list("cdefghi"), "train", batch(7))
    store.put_samples(list("cdefgh"), "train", batch(6))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.put_samples, ["i"], "train", batch(1))
        store.clear_samples(["a"], "train")
        waiting.result(20)
    assert store.get_samples(["b", "i"], "train", ["x"]).batch_size == (2,)
