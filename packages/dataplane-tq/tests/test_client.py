"""Promises of the client beyond the contract suite, on one shared TransferQueue.

Imports internals: one test patches the wire to lose an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch
from directory_calls import stop, until
from queue_setup import batch, pid_of
from transfer_queue.sampler import SequentialSampler

from dataplane_core import (
    ClosedError,
    ConfigError,
    DeadlineExceededError,
    InMemoryDataPlaneClient,
    MissingDataError,
    UnavailableError,
)
from dataplane_tq import TQDataPlaneClient
from dataplane_tq.directory import protocol as p
from dataplane_tq.directory import wire


class SamplerOfGroups(SequentialSampler):
    def __init__(self, group_size):
        super().__init__()


@pytest.fixture
def partition(owner):
    name = f"train-{uuid.uuid4().hex[:8]}"
    owner.register_partition(name, ["x"], 8, ["train"])
    owner.put_samples(["a", "b"], name, batch(2))
    return name


def test_process_without_ray_gets_a_hint(config):
    code = f"""
from dataplane_core import UnavailableError
from dataplane_tq import TQDataPlaneClient
for bootstrap in (True, False):
    try:
        TQDataPlaneClient({config!r}, bootstrap=bootstrap)
    except UnavailableError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.count("call join_ray() first") == 2


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"backend": "punched_cards"}, "'punched_cards'"),
        ({"num_storage_units": 0}, "num_storage_units"),
        ({"global_segment_size": 5}, "global_segment_size"),
        ({"packed_transport": "pigeon"}, "packed_transport"),
        ({"unit_resources": {"CPU": 1.0}}, "unit_resources.CPU: .* expected a custom resource"),
        ({"unit_resources": {"nodes": 0.0}}, "unit_resources.nodes: found 0.0; .* more than 0"),
        ({"unit_resources": {"nodes": 2.0}}, "need .* of it, but this Ray cluster has 0"),
        ({"sampler": "nowhere:Sampler"}, "nowhere:Sampler"),
        ({"sampler": "collections:OrderedDict"}, "not a subclass"),
        ({"sampler": f"{__name__}:SamplerOfGroups"}, "without arguments .*missing 1 required"),
        ({"backend": "ray", "unit_resources": {"n": 1.0}}, "unit_resources: .* packed, simple"),
        ({"backend": "simple", "packed_transport": "tcp"}, "packed_transport: .* one of packed"),
    ],
)
def test_wrong_configuration_is_refused_by_name(cluster, config, change, named):
    with pytest.raises(ValueError, match=named):
        TQDataPlaneClient({**config, **change})


def test_missing_key_is_refused_by_name(config):
    del config["storage_capacity"]
    with pytest.raises(ConfigError, match="storage_capacity"):
        TQDataPlaneClient(config)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("backend", "simple"),
        ("storage_capacity", 5),
        ("num_storage_units", 1),
        ("global_segment_size", 1 << 20),
        ("local_buffer_size", 5),
        ("unit_resources", {"nodes": 1.0}),
        ("packed_transport", "tcp"),
        ("claim_order", "builtins:len"),
        ("sampler", "transfer_queue.sampler:SequentialSampler"),
        ("transfer_queue_mirror", False),
    ],
)
def test_attaching_with_another_value_than_the_store_is_refused(owner, config, key, value):
    with pytest.raises(ConfigError, match=rf"{key}: found .*; expected .*remove the keys") as error:
        TQDataPlaneClient({**config, key: value}, bootstrap=False)
    assert repr(value) in str(error.value)


def test_attaching_client_needs_no_key_of_the_store(owner, partition):
    own = {"enabled": True, "impl": "transfer_queue", "claim_lease_s": 60.0}
    with TQDataPlaneClient(own, bootstrap=False) as client:
        assert client.get_samples(["a"], partition, ["x"]).batch_size == (1,)


def test_closing_a_client_ends_its_running_calls(owner, config):
    client = TQDataPlaneClient(config, bootstrap=False)
    began = threading.Event()

    async def hang():
        began.set()
        await asyncio.Event().wait()

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(client._engine.run, "put", hang)
        assert began.wait(20)
        client.close()
        with pytest.raises(ClosedError, match=r"put: .* was closed"):
            running.result(20)


def test_all_parts_of_a_local_ray_listen_on_loopback_only(owner, partition):
    listening = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            for connection in process.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN:
                    listening.setdefault(process.name(), set()).add(connection.laddr.ip)
    assert {"gcs_server", "raylet", "ray::DirectoryActor", "ray::UnitActor"} <= set(listening)
    assert set().union(*listening.values()) <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}


def test_stopped_controller_fails_puts_but_not_reads(owner, partition, config):
    config["ack_timeout_ms"] = 1500
    pid = pid_of("TransferQueueController")
    ids = []
    with TQDataPlaneClient(config, bootstrap=False) as client:
        stop(pid)
        try:
            started = time.monotonic()

            def put_repeatedly() -> None:
                for number in range(100):  # the first puts do not wait for the controller
                    client.put_samples([f"s{number}"], partition, batch(1))
                    ids.append(f"s{number}")

            with pytest.raises(TimeoutError, match=r"no answer|did not register"):
                put_repeatedly()
            assert time.monotonic() - started < 10
            assert owner.get_samples(ids, partition, ["x"]).batch_size == (len(ids),)
        finally:
            os.kill(pid, signal.SIGCONT)
    assert 0 < len(ids) < 100
    assert owner.get_samples(ids, partition, ["x"]).batch_size == (len(ids),)


def test_stopped_controller_fails_clears_but_not_gets_and_claims(owner, partition, config):
    config["ack_timeout_ms"] = 500
    pid = pid_of("TransferQueueController")
    # Else the owner would still be reporting the fixture's put.
    futures.wait(owner._reporter._pending, timeout=20)
    with TQDataPlaneClient(config, bootstrap=False) as client:
        stop(pid)
        try:
            started = time.monotonic()
            assert client.claim_meta(partition, "train", ["x"], 1, blocking=False).size == 1
            assert client.get_samples(["a", "b"], partition, ["x"]).batch_size == (2,)
            with pytest.raises(DeadlineExceededError, match="clear_samples"):
                client.clear_samples(["a"], partition)
            with pytest.raises(MissingDataError):
                client.get_samples(["a"], partition, ["x"])
            assert client.claim_meta(partition, "train", ["x"], 1, blocking=False).size == 1
            assert time.monotonic() - started < 5
        finally:
            os.kill(pid, signal.SIGCONT)
    owner.put_samples(["a"], partition, batch(1))
    owner.clear_samples(["a", "b"], partition)
    assert owner.inspector.count_samples(partition, "train", ["x"]).ready == 0


def test_failed_report_of_a_put_is_raised_by_the_next_put(owner, partition, config, monkeypatch):
    async def refuse(*arguments):
        raise RuntimeError("not now")

    with TQDataPlaneClient(config, bootstrap=False) as client:
        with monkeypatch.context() as patch:
            patch.setattr(client._engine.client.storage_manager, "notify_data_update", refuse)
            client.put_samples(["a"], partition, batch(1))
            futures.wait(client._reporter._pending, timeout=20)
        with pytest.raises(UnavailableError, match=r"earlier put .* can be read.*not now"):
            client.put_samples(["b"], partition, batch(1))
        client.put_samples(["c"], partition, batch(1))
    assert owner.get_samples(["a", "c"], partition, ["x"]).batch_size == (2,)
    owner.clear_samples(["a", "c"], partition)


@pytest.mark.parametrize("committed", [True, False])
def test_put_with_a_lost_answer_can_be_withdrawn(owner, partition, monkeypatch, committed):
    ask = wire.Session.ask

    def unanswered(session, request, answer, timeout_s=None):
        if not isinstance(request, p.CommitPut):
            return ask(session, request, answer, timeout_s)
        if committed:
            ask(session, request, answer, timeout_s)
        raise DeadlineExceededError("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(wire.Session, "ask", unanswered)
        with pytest.raises(DeadlineExceededError, match="no answer"):
            owner.put_samples(["c"], partition, batch(1))
    owner.withdraw_samples(["c"], partition)
    with pytest.raises(MissingDataError, match="'c'"):
        owner.get_samples(["c"], partition, ["x"])
    assert owner.inspector.count_samples(partition, "train", ["x"]).put == 2
    owner.put_samples(["c"], partition, batch(1))
    assert owner.inspector.count_samples(partition, "train", ["x"]).put == 3


def test_second_bootstrap_is_refused_and_harms_nothing(owner, partition, config):
    with pytest.raises(ConfigError, match="already runs"):
        TQDataPlaneClient(config)
    assert owner.get_samples(["a"], partition, ["x"]).batch_size == (1,)


def test_clients_of_one_store_have_equal_store_keys(owner, config):
    with TQDataPlaneClient(config, bootstrap=False) as attached:
        assert attached.store_key == owner.store_key
        assert hash(attached.store_key) == hash(owner.store_key)
        assert attached.store_key != InMemoryDataPlaneClient().store_key


def test_closing_an_attached_client_stops_nothing(owner, partition, config):
    TQDataPlaneClient(config, bootstrap=False).close()
    assert owner.get_samples(["a"], partition, ["x"]).batch_size == (1,)


def test_closing_a_client_ends_its_blocked_claims(owner, partition, config):
    client = TQDataPlaneClient(config, bootstrap=False)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.claim_meta, partition, "train", ["x"], 8, timeout_s=600)
        until(lambda: client._link._open)
        client.close()
        with pytest.raises(ClosedError, match="was closed"):
            waiting.result(20)
    assert owner.claim_meta(partition, "train", ["x"], 8, blocking=False).size == 2


def test_forked_client_fails_at_once_and_stops_nothing(owner, partition):
    owner.put_samples(["a"], partition, batch(1))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(20)
            with pytest.raises(UnavailableError, match="fork"):
                owner.get_samples(["a"], partition, ["x"])
            owner.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert owner.get_samples(["a"], partition, ["x"]).batch_size == (1,)


def test_sixteen_threads_make_the_first_call_of_a_client(owner, partition, config):
    with TQDataPlaneClient(config, bootstrap=False) as client:
        barrier = threading.Barrier(16)

        def first_call():
            barrier.wait(20)
            return client.get_samples(["a", "b"], partition, ["x"]).batch_size

        with ThreadPoolExecutor(16) as pool:
            calls = [pool.submit(first_call) for _ in range(16)]
            assert all(call.result(30) == (2,) for call in calls)


def test_torch_thread_count_of_the_caller_is_unchanged(owner, partition):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        owner.put_samples(["c"], partition, batch(1))
        owner.get_samples(["c"], partition, ["x"])
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("emptied_first", [True, False])
@pytest.mark.filterwarnings("ignore:.*nothing to clear:RuntimeWarning")
def test_cleared_partition_is_gone_from_the_controller(owner, partition, emptied_first):
    if emptied_first:
        owner.clear_samples(["a", "b"], partition)
    owner.clear_samples(None, partition)
    engine = owner._engine
    assert partition not in engine.run("list", engine.client.async_get_partition_list)
