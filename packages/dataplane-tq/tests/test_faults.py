"""Faults: killed parts, exhausted capacity, and what is left after closing.

Imports internals: a patch holds a producer in the step that reports its rows, or makes a part fail.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import ray
import torch
from tensordict import TensorDict

from dataplane_core import CapacityExceeded, ConfigError, UnavailableError
from dataplane_tq import TQDataPlaneClient
from dataplane_tq import client as client_module
from dataplane_tq.mirror import rows as rows_in

pytestmark = pytest.mark.slow


def batch(count):
    return TensorDict({"x": torch.ones(count, 4)}, batch_size=[count])


@pytest.fixture
def config(config):
    """Return a configuration with one storage unit, which starts faster than two."""
    return {**config, "num_storage_units": 1, "storage_capacity": 8}


@pytest.fixture
def make_store(cluster, config):
    """Return a function that starts a separate TransferQueue; a test uses it or ``owner``."""
    stores = []

    def make(**changes):
        client = TQDataPlaneClient({**config, **changes})
        stores.append(client)
        client.register_partition("train", ["x"], 8, ["train"])
        client.put_samples(["a", "b"], "train", batch(2))
        return client

    yield make
    for store in stores:
        store.close()


@pytest.fixture
def store(make_store):
    return make_store()


OPERATIONS = {
    "put": lambda client: client.put_samples(["c"], "train", batch(1)),
    "get": lambda client: client.get_samples(["a", "b"], "train", ["x"]),
    "claim": lambda client: client.claim_meta("train", "train", ["x"], 1, blocking=False),
    "blocked claim": lambda client: client.claim_meta("train", "train", ["x"], 8, timeout_s=60),
    "check": lambda client: client.check_consumption_status("train", ["train"]),
    "count": lambda client: client.inspector.count_samples("train", "train", ["x"]),
    "clear": lambda client: client.clear_samples(["c"], "train"),
    "list": lambda client: client.inspector.list_partitions(),
}


def pid_of(actor):
    return ray.get(actor.__ray_call__.remote(lambda self: os.getpid()))


def until_unavailable(operation, client):
    """Repeat an operation until it raises `UnavailableError`; return the error."""
    deadline = time.monotonic() + 15
    while time.monotonic() < deadline:
        try:
            operation(client)
        except UnavailableError as error:
            return error
    raise AssertionError("the operation does not fail")


@pytest.mark.parametrize(
    ("backend", "part"),
    [
        ("packed", "TransferQueueController"),
        ("packed", "DataPlaneDirectory"),
        ("packed", "DataPlanePackedUnit#1"),
        pytest.param("simple", "TransferQueueStorageUnit#0", marks=pytest.mark.long),
    ],
)
def test_killed_part_fails_every_operation_within_seconds(make_store, backend, part):
    store = make_store(backend=backend, num_storage_units=2)
    with ThreadPoolExecutor(len(OPERATIONS)) as pool:
        waiting = pool.submit(OPERATIONS["blocked claim"], store)
        os.kill(pid_of(ray.get_actor(part, namespace="transfer_queue")), signal.SIGKILL)
        running = [
            pool.submit(until_unavailable, operation, store) for operation in OPERATIONS.values()
        ]
        assert isinstance(waiting.exception(timeout=15), UnavailableError)
        for operation in running:
            operation.result(timeout=15)  # much less than the time-out of a request
    again = until_unavailable(OPERATIONS["get"], store)
    assert part in str(again) or "directory" in str(again)


class Producer:
    """Ray actor that puts, and hangs at a given place of the put."""

    def __init__(self, config):
        self.client = TQDataPlaneClient(config, bootstrap=False)

    def pid(self):
        return os.getpid()

    def hang_in(self, place, marker):
        def hang(*args, **kwargs):
            Path(marker).touch()
            threading.Event().wait()

        async def hang_after_the_put(*args):
            await asyncio.to_thread(hang)

        if place == "write":
            self.client._store.write = hang
        else:
            rows_in.enter = hang_after_the_put
        self.client.put_samples(["c", "d"], "train", batch(2))
        threading.Event().wait()


@pytest.mark.parametrize("place", ["write", "enter"])
def test_producer_killed_in_a_put_loses_and_leaves_nothing(store, config, tmp_path, place):
    producer = ray.remote(Producer).options(num_cpus=0.1).remote(config)
    pid = ray.get(producer.pid.remote(), timeout=180)
    marker = tmp_path / "there"
    hanging = producer.hang_in.remote(place, str(marker))
    deadline = time.monotonic() + 30
    while not marker.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(hanging, timeout=180)
    if place == "enter":
        assert store.get_samples(["c", "d"], "train", ["x"]).batch_size == (2,)
    # Eight fit: the dead producer's reservation is free, and its ids can be put.
    store.put_samples(list("cdefgh"), "train", batch(6))
    assert store.get_samples(list("abcdefgh"), "train", ["x"]).batch_size == (8,)
    counts = store.inspector.count_samples("train", "train", ["x"])
    assert (counts.put, counts.ready, counts.cleared) == (8, 8, 0)
    store.clear_samples(None, "train")
    assert bytes_used(store) == 0


def bytes_used(store):
    return sum(unit.used for unit in store.inspector.list_storage())


DRIVER = """
import sys, threading
import torch
from tensordict import TensorDict
from dataplane_tq import TQDataPlaneClient, join_ray
join_ray(sys.argv[1], namespace="a driver", logging_level="ERROR", log_to_driver=False)
client = TQDataPlaneClient(eval(sys.argv[2]))
client.register_partition("train", ["x"], 2, ["train"])
client.put_samples(["a", "b"], "train", TensorDict({"x": torch.ones(2, 4)}, batch_size=[2]))
print("ready", flush=True)
threading.Event().wait()
"""


def test_clients_survive_a_stopped_driver_but_not_a_dead_one(cluster, config):
    address = ray.get_runtime_context().gcs_address
    command = [sys.executable, "-c", DRIVER, address, repr(config)]
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert driver.stdout.readline().strip() == "ready"
        with TQDataPlaneClient(config, bootstrap=False) as client:
            os.kill(driver.pid, signal.SIGSTOP)
            assert os.WIFSTOPPED(os.waitpid(driver.pid, os.WUNTRACED)[1])
            client.put_samples(["c"], "train", batch(1))
            assert client.get_samples(["a", "c"], "train", ["x"]).batch_size == (2,)
            assert client.claim_meta("train", "train", ["x"], 3, timeout_s=5).size == 3
            client.clear_samples(["b"], "train")
            driver.kill()
            until_unavailable(OPERATIONS["put"], client)
    finally:
        driver.kill()
        driver.communicate(timeout=20)
    # Another driver can bootstrap.
    deadline = time.monotonic() + 30
    while True:
        try:
            with TQDataPlaneClient(config) as after:
                after.register_partition("train", ["x"], 2, ["train"])
                after.put_samples(["a"], "train", batch(1))
            return
        except ConfigError:  # Ray has not yet ended the dead driver's actors
            assert time.monotonic() < deadline


@pytest.mark.long
def test_five_hundred_steps_leak_nothing(make_store):
    """No bytes, rows, connections, descriptors or memory remain."""
    store = make_store(storage_capacity=64, num_storage_units=2)
    store.clear_samples(None, "train")
    units = [
        pid_of(ray.get_actor(name, namespace="transfer_queue"))
        for name in ("DataPlaneDirectory", "DataPlanePackedUnit#0", "DataPlanePackedUnit#1")
    ]
    ids = [f"s{i}" for i in range(32)]
    rng = torch.Generator().manual_seed(0)

    def step():
        lengths = torch.randint(1, 500, (32,), generator=rng)
        rows = torch.nested.nested_tensor([torch.ones(n) for n in lengths], layout=torch.jagged)
        store.register_partition("soak", ["x"], 32, ["train"])
        store.put_samples(ids, "soak", TensorDict({"x": rows}, batch_size=[32]))
        meta = store.claim_meta("soak", "train", ["x"], 32, timeout_s=20)
        assert store.get_data(meta)["x"].offsets()[-1] == lengths.sum()
        store.put_samples(ids, "soak", TensorDict({"y": torch.ones(32)}, batch_size=[32]))
        store.clear_samples(ids[:20], "soak")
        store.clear_samples(None, "soak")

    def footprint():
        descriptors = sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in units)
        resident = sum(resident_mb(pid) for pid in units)
        return descriptors, resident

    for _ in range(50):
        step()
    before = footprint()
    for _ in range(450):
        step()
    assert bytes_used(store) == 0
    assert store.inspector.list_partitions() == []
    # On a busy machine connections of the last steps close a moment later; a leak would stay.
    deadline = time.monotonic() + 30
    while (after := footprint())[0] > before[0] + 2 and time.monotonic() < deadline:
        threading.Event().wait(0.1)
    assert after[0] <= before[0] + 2
    assert after[1] <= before[1] + 8


def resident_mb(pid):
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def test_attach_without_a_bootstrap_ends_at_the_deadline(cluster, config):
    config["ack_timeout_ms"] = 300
    with pytest.raises(UnavailableError, match="bootstrap=True on the driver"):
        TQDataPlaneClient(config, bootstrap=False)


@pytest.mark.parametrize("part", ["Link", "Reporter", "PackedStore"])
def test_failed_construction_leaves_no_actor_and_no_thread(cluster, config, monkeypatch, part):
    def fail(*arguments, **keywords):
        raise OSError("no memory")

    before = set(threading.enumerate())
    with monkeypatch.context() as patch:
        patch.setattr(client_module, part, fail)
        with pytest.raises(OSError, match="no memory") as error:
            TQDataPlaneClient(config)
    assert error.tb  # the traceback holds the actors' handles, which keep unstopped actors alive
    assert_no_actors()
    for thread in set(threading.enumerate()) - before:
        thread.join(20)
        assert not thread.is_alive()


def by_id(sample_id, tags):
    return 0


def test_claim_order_that_the_directory_lacks_is_one_error(cluster, config, monkeypatch):
    monkeypatch.setitem(sys.modules, "only_here", sys.modules[__name__])
    with pytest.raises(UnavailableError, match=r"claim_order: found 'only_here:by_id'") as error:
        TQDataPlaneClient({**config, "claim_order": "only_here:by_id"})
    assert "Traceback" not in str(error.value)
    assert "\n" not in str(error.value)
    assert_no_actors()


def test_closing_the_owner_leaves_no_actor_behind(cluster, config):
    client = TQDataPlaneClient(config)
    client.close()
    assert_no_actors()


def assert_no_actors():
    for name in ("TransferQueueController", "DataPlaneDirectory", "DataPlanePackedUnit#0"):
        with pytest.raises(ValueError, match=name):
            ray.get_actor(name, namespace="transfer_queue")


def test_capacity_is_exact_and_a_clear_unblocks_a_put(store, config):
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
