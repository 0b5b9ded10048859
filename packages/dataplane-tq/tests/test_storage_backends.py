"""What each storage backend does under TransferQueue's own client, in two processes.

Facts of the backends stand here as promises, also the unpleasant ones: they decide what the data
plane's client may build on.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from importlib.util import find_spec
from pathlib import Path

import pytest
import ray
import torch
from tensordict import NonTensorStack, TensorDict
from transfer_queue.client import AsyncTransferQueueClient
from transfer_queue.controller import TransferQueueController

from dataplane_core import ConfigError, UnavailableError
from dataplane_tq.storage import BACKENDS
from dataplane_tq.storage.daemon import DaemonActor
from dataplane_tq.topology import attach, bootstrap

pytestmark = pytest.mark.slow

NAMES = ["simple", "ray", "mooncake_cpu", "yuanrong"]
DAEMONS = {"mooncake_cpu": "MooncakeMaster", "yuanrong": "YuanrongWorker"}
NAMESPACE = "transfer_queue"
CONFIG = {
    "enabled": True,
    "impl": "transfer_queue",
    "storage_capacity": 1000,
    "num_storage_units": 1,
    "claim_meta_poll_interval_s": 5.0,
    "global_segment_size": 64 << 20,
    "local_buffer_size": 16 << 20,
}


class Process:
    """One process's connection, as the engine makes it."""

    def __init__(self, controller, manager, connection):
        self.loop = asyncio.new_event_loop()
        self.client = AsyncTransferQueueClient(
            client_id=uuid.uuid4().hex[:8], controller_info=controller
        )
        self.client.initialize_storage_manager(manager_type=manager, config=dict(connection))

    def rows(self, partition, keys, create=False):
        retrieve = self.client.async_kv_retrieve_meta(keys, partition, create=create)
        return self.loop.run_until_complete(retrieve)

    def put(self, partition, keys, data):
        rows = self.rows(partition, keys, create=True)
        self.loop.run_until_complete(self.client.storage_manager.put_data(data, rows))

    def read(self, rows):
        return self.loop.run_until_complete(self.client.async_get_data(rows))

    def get(self, partition, keys, fields):
        return self.read(self.rows(partition, keys).select_fields(fields))

    def clear(self, partition, keys):
        rows = self.rows(partition, keys)
        self.loop.run_until_complete(self.client.async_clear_samples(rows))

    def close(self):
        self.client.close()


class Host:
    """Connections of another process, one for each backend."""

    def __init__(self):
        self.processes = {}

    def connect(self, name, *args):
        self.processes[name] = Process(*args)

    def call(self, name, method, args):
        return getattr(self.processes[name], method)(*args)


class Peer:
    """`Process` in another process."""

    def __init__(self, host, name, *args):
        self.host = host
        self.name = name
        ray.get(host.connect.remote(name, *args), timeout=60)

    def __getattr__(self, method):
        return lambda *args: ray.get(self.host.call.remote(self.name, method, args), timeout=60)


def start(name, namespace=NAMESPACE):
    backend = BACKENDS[name]()
    cfg = {**CONFIG, "backend": name}
    backend.check(cfg)
    backend.start(cfg, namespace=namespace, actor_cpus=0.1, timeout_s=60)
    return backend


@pytest.fixture(scope="module")
def controller(cluster):
    actor = TransferQueueController.options(
        name="TransferQueueController", namespace=NAMESPACE, num_cpus=0.1
    ).remote(polling_mode=True)
    yield ray.get(actor.get_zmq_server_info.remote(), timeout=60)
    ray.kill(actor)


def only(*names):
    """Run a test with these backends."""
    return pytest.mark.parametrize("backend", names, indirect=True, scope="module")


@pytest.fixture(scope="module", params=NAMES)
def backend(request, controller, require_backend):
    running = start(require_backend(request.param))
    running.name = request.param
    yield running
    running.stop()


@pytest.fixture(scope="module")
def here(backend, controller):
    process = Process(controller, backend.manager, backend.connection)
    yield process
    process.close()


@pytest.fixture(scope="module")
def host(cluster):
    return ray.remote(Host).options(num_cpus=0.1).remote()


@pytest.fixture(scope="module")
def there(host, backend, controller):
    return Peer(host, backend.name, controller, backend.manager, backend.connection)


@pytest.fixture
def partition():
    return uuid.uuid4().hex


def keys(count):
    return [f"key-{i}" for i in range(count)]


def ragged(*rows):
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def tensors(count, seed=0):
    random = torch.Generator().manual_seed(seed)
    ids = [torch.randint(-(2**62), 2**62, (1 + i % 37,), generator=random) for i in range(count)]
    columns = {
        "ids": ragged(*ids),
        "half": torch.randn(count, 5, generator=random).bfloat16(),
        "score": torch.randn(count, generator=random),
        "valid": torch.rand(count, generator=random) > 0.5,
    }
    return TensorDict(columns, batch_size=count)


def blobs(count, seed=0):
    random = torch.Generator().manual_seed(seed)
    rows = [
        torch.randint(0, 256, (i,), generator=random, dtype=torch.uint8).numpy().tobytes()
        for i in range(count)
    ]
    return TensorDict({"blob": NonTensorStack(*rows)}, batch_size=count)


def batch(backend, count, seed=0):
    data = blobs(count, seed)
    if not backend.rows_as_bytes:
        data.update(tensors(count, seed))
    return data


def assert_same(found, expected):
    """Bit for bit, row by row: what was dense may come back jagged."""
    assert set(found.keys()) == set(expected.keys())
    for name in expected.keys():  # noqa: SIM118  # a TensorDict iterates over its rows
        one, other = list(found.get(name)), list(expected.get(name))
        if isinstance(expected.get(name), torch.Tensor):
            one, other = list(found.get(name).unbind()), list(expected.get(name).unbind())
            for a, b in zip(one, other, strict=True):
                assert (a.dtype, a.shape) == (b.dtype, b.shape), name
                assert torch.equal(a, b), name
        else:
            assert found.get(name).tolist() == expected.get(name).tolist()


def test_rows_put_in_one_process_are_read_in_the_other(backend, here, there, partition):
    data = batch(backend, 64)
    here.put(partition, keys(64), data)
    assert_same(there.get(partition, keys(64), list(data.keys())), data)
    other = batch(backend, 64, seed=1)
    there.put(partition + "-back", keys(64), other)
    assert_same(here.get(partition + "-back", keys(64), list(other.keys())), other)


def test_rows_are_read_in_the_order_asked_for(here, there, partition):
    here.put(partition, keys(8), blobs(8))
    there_first = there.get(partition, keys(8)[::-1], ["blob"])["blob"]
    assert list(there_first) == list(blobs(8)["blob"])[::-1]


def test_an_overwritten_field_is_read_everywhere_and_leaves_the_others(
    backend, here, there, partition
):
    data = batch(backend, 8)
    data["kept"] = NonTensorStack(*[b"kept"] * 8)
    here.put(partition, keys(8), data)
    changed = batch(backend, 8, seed=1)
    there.put(partition, keys(8), changed)
    for process in (here, there):
        assert_same(process.get(partition, keys(8), list(changed.keys())), changed)
        assert set(process.get(partition, keys(8), ["kept"])["kept"]) == {b"kept"}


def test_cleared_rows_are_gone_and_their_keys_can_be_put_again(backend, here, there, partition):
    data = batch(backend, 8)
    here.put(partition, keys(8), data)
    there.clear(partition, keys(8))
    assert here.rows(partition, keys(8)).size == 0
    again = batch(backend, 8, seed=1)
    here.put(partition, keys(8), again)
    assert_same(there.get(partition, keys(8), list(again.keys())), again)


def test_a_meta_from_before_a_clear_reads_an_error_or_nothing(backend, here, there, partition):
    here.put(partition, keys(4), blobs(4))
    stale = here.rows(partition, keys(4)).select_fields(["blob"])
    there.clear(partition, keys(2))
    if backend.name == "yuanrong":
        assert list(here.read(stale)["blob"])[:2] == [None, None]  # and no error
    else:
        with pytest.raises((RuntimeError, KeyError, ValueError)):
            here.read(stale)


def is_gone(actor):
    try:
        ray.get(actor.__ray_ready__.remote(), timeout=30)
    except ray.exceptions.RayActorError:
        return True
    return False


@only("mooncake_cpu", "ray")
def test_rows_of_a_process_that_ended(backend, here, controller, partition):
    other = ray.remote(Host).options(num_cpus=0.1).remote()
    putter = Peer(other, backend.name, controller, backend.manager, backend.connection)
    putter.put(partition, keys(4), blobs(4))
    ray.kill(other)
    wait_until(lambda: is_gone(other))
    if backend.name == "ray":
        with pytest.raises(RuntimeError, match="Failed to retrieve"):
            wait_until(lambda: here.get(partition, keys(4), ["blob"]) is None)  # some reads succeed
    else:
        assert_same(here.get(partition, keys(4), ["blob"]), blobs(4))


@only("simple", "mooncake_cpu", "yuanrong")
def test_rows_without_elements(backend, here, there, partition):
    empty = {
        "ragged": ragged(torch.arange(3), torch.arange(0)),
        "dense": torch.zeros(2, 0),
    }
    for name, column in empty.items():
        data = TensorDict({name: column}, batch_size=2)
        if backend.name == "mooncake_cpu":
            with pytest.raises(RuntimeError, match="batch_upsert_from failed"):
                here.put(partition, keys(2), data)
        else:
            here.put(partition, keys(2), data)
            assert_same(there.get(partition, keys(2), [name]), data)


def test_tensors_of_backends_that_take_rows_as_bytes(backend, here, there, partition):
    data = tensors(4)
    if backend.name == "ray":
        if find_spec("nixl") is None:
            with pytest.raises(ModuleNotFoundError, match="nixl"):
                here.put(partition, keys(4), data)
    elif backend.name == "mooncake_cpu":
        here.put(partition, keys(4), data)
        found = there.get(partition, keys(4), ["ids", "half", "score"])
        assert_same(found.select("ids", "half"), data.select("ids", "half"))
        assert [row.shape for row in found["score"].unbind()] == [(1,)] * 4  # were scalars
        integers = torch.arange(4, dtype=torch.int32)
        there.put(partition, keys(4), TensorDict({"score": integers}, batch_size=4))
        found = here.get(partition, keys(4), ["score"])["score"]
        assert found.dtype == torch.float32  # the first put's, over the bytes of the second


def test_a_put_of_no_rows_does_nothing(here, partition):
    here.put(partition, keys(1), blobs(1))
    rows = here.rows(partition, keys(1)).select_samples([])
    here.loop.run_until_complete(
        here.client.storage_manager.put_data(TensorDict({}, batch_size=0), rows)
    )
    assert here.rows(partition, keys(1)).size == 1


@only("mooncake_cpu")  # the others are unbounded, or refuse after a minute only
def test_a_full_store_refuses_and_keeps_what_it_has(here, partition):
    large = TensorDict({"blob": NonTensorStack(bytes(CONFIG["global_segment_size"]))}, batch_size=1)
    here.put(partition, keys(1), blobs(1))
    with pytest.raises(RuntimeError, match="-200"):
        here.put(partition, ["large"], large)
    assert_same(here.get(partition, keys(1), ["blob"]), blobs(1))


def left_by(actor):
    """The processes of a daemon's actor, and its folder."""
    pids = ray.get(actor.pids.remote(), timeout=30)
    folder = ray.get(actor.__ray_call__.remote(lambda owner: owner.folder), timeout=30)
    assert len(pids) == 2
    assert folder.exists()
    return pids, folder


def wait_until(what, *, timeout_s=30.0):
    deadline = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def gone(pids, folder):
    """Whether no process is left, nor the folder; a zombie is nobody's process."""
    statuses = [Path(f"/proc/{pid}/stat") for pid in pids]
    alive = [s for s in statuses if s.exists() and s.read_text().rsplit(")")[-1].split()[0] != "Z"]
    return not alive and not folder.exists()


@pytest.mark.parametrize("name", DAEMONS)
def test_stop_leaves_no_process_and_no_file(cluster, require_backend, name):
    backend = start(require_backend(name), namespace=uuid.uuid4().hex)
    pids, folder = left_by(backend.actors[DAEMONS[name]])
    mapped = [line for pid in pids for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    assert not [line for line in mapped if "/dev/shm/" in line]
    backend.stop()
    wait_until(lambda: gone(pids, folder), timeout_s=2)  # the kernel's share of an exit


@pytest.fixture
def daemon(cluster):
    """An actor with a daemon that runs."""
    actor = ray.remote(DaemonActor).options(num_cpus=0.1).remote()
    started = actor.run.remote(["/bin/sleep", "600"], ready=lambda: True, timeout_s=30)
    ray.get(started, timeout=60)
    wait_until(lambda: ray.get(actor.pids.remote(), timeout=30))
    yield actor
    ray.kill(actor)


@pytest.mark.parametrize("which", [0, 1], ids=["supervisor", "daemon"])
def test_an_actor_ends_with_its_daemon(daemon, which):
    pids, folder = left_by(daemon)
    os.kill(pids[which], signal.SIGKILL)
    with pytest.raises(ray.exceptions.RayActorError):
        wait_until(lambda: ray.get(daemon.pids.remote(), timeout=30) is None)
    wait_until(lambda: gone(pids, folder))


@pytest.mark.parametrize("how", ["SIGKILL", "ray.kill"])
def test_a_daemon_ends_with_its_actor(daemon, how):
    pids, folder = left_by(daemon)
    if how == "SIGKILL":
        owner = ray.get(daemon.__ray_call__.remote(lambda _: os.getpid()), timeout=30)
        os.kill(owner, signal.SIGKILL)
    else:
        ray.kill(daemon)
    wait_until(lambda: gone(pids, folder))


def test_a_daemon_ends_with_a_killed_driver(cluster):
    script = """
        import sys, ray
        from dataplane_tq import join_ray
        from dataplane_tq.storage.daemon import DaemonActor
        join_ray(sys.argv[1], logging_level="ERROR", log_to_driver=False)
        actor = ray.remote(DaemonActor).options(num_cpus=0.1).remote()
        sleep = ["/bin/sleep", "600"]
        ray.get(actor.run.remote(sleep, ready=lambda: True, timeout_s=30), timeout=60)
        while not (pids := ray.get(actor.pids.remote())):
            pass
        print(*pids)
        print(ray.get(actor.__ray_call__.remote(lambda owner: owner.folder)), flush=True)
        sys.stdin.read()
    """
    address = ray.get_runtime_context().gcs_address
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as driver:
        pids = [int(pid) for pid in driver.stdout.readline().split()]
        folder = Path(driver.stdout.readline().strip())
        assert len(pids) == 2
        assert folder.exists()
        driver.kill()
    wait_until(lambda: gone(pids, folder))


@pytest.mark.parametrize(
    ("command", "timeout_s", "found"),
    [
        (["/bin/sh", "-c", "echo first; echo no port >&2; exit 3"], 30.0, "ended while"),
        (["/bin/sh", "-c", "echo no port; exec sleep 600"], 1.0, "not ready after 1 s"),
        (["/no port"], 30.0, "No such file"),
    ],
)
def test_a_failing_start_reports_the_last_output(command, timeout_s, found):
    owner = DaemonActor()
    with pytest.raises(UnavailableError, match=found) as error:
        owner.run(command, ready=lambda: False, timeout_s=timeout_s)
    assert "no port" in str(error.value)
    wait_until(lambda: gone(owner.pids(), owner.folder), timeout_s=2)


def test_a_transfer_queue_that_another_started_is_neither_replaced_nor_attached_to(controller):
    with pytest.raises(ConfigError, match=r"dataplane-tq did not start.*a Ray cluster of its own"):
        bootstrap({**CONFIG, "backend": "packed"})
    with pytest.raises(UnavailableError, match=r"dataplane-tq did not start.*cannot attach"):
        attach(0.1)


@pytest.mark.parametrize("name", ["mooncake_cpu", "yuanrong"])
def test_check_names_the_key_and_the_extra(name, monkeypatch):
    with pytest.raises(ConfigError, match=r"global_segment_size: found 1; .* at least"):
        BACKENDS[name].check({**CONFIG, "backend": name, "global_segment_size": 1})
    monkeypatch.setattr("dataplane_tq.storage.base.find_spec", lambda _: None)
    with pytest.raises(
        ConfigError, match=r"comes with the extra dataplane-tq\[(mooncake|yuanrong)\]"
    ):
        BACKENDS[name].check({**CONFIG, "backend": name})
