"""Promises of the client that TransferQueue 0.1.11 alone does not keep.

`test_upstream_behavior.py` shows TransferQueue's own behavior. Promises that the contract suite
tests on each backend are not repeated here.
"""

from __future__ import annotations

import os
import signal
import uuid
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest
import torch
from directory_calls import TIMEOUT_S, stop, until
from queue_setup import CONFIG, ask, batch, pid_of
from tensordict import TensorDict

from dataplane_core import (
    CapacityExceeded,
    DeadlineExceededError,
    InvalidRequestError,
    UnavailableError,
)
from dataplane_tq import TQDataPlaneClient

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*nothing to clear:RuntimeWarning"),
]


@pytest.fixture(scope="module", params=["packed", "simple"])
def backend(request):
    return request.param


ATTACHED = {"enabled": True, "impl": "transfer_queue"}


@pytest.fixture(scope="module")
def owner(cluster, backend):
    with TQDataPlaneClient({**CONFIG, "backend": backend, "storage_capacity": 8}) as client:
        yield client


@pytest.fixture(scope="module")
def peer(owner):
    with TQDataPlaneClient(ATTACHED, bootstrap=False) as client:
        yield client


@pytest.fixture
def hasty(owner):
    """Yield a client with a deadline of two seconds."""
    with TQDataPlaneClient({**ATTACHED, "ack_timeout_ms": 2000}, bootstrap=False) as client:
        yield client


@pytest.fixture
def register(owner):
    """Return a function that registers a partition of eight samples for the task 'train'."""
    names = []

    def register(**options):
        names.append(f"p-{uuid.uuid4().hex[:8]}")
        owner.register_partition(names[-1], ["x"], 8, ["train"], **options)
        return names[-1]

    yield register
    for name in names:
        owner.clear_samples(None, name, force=True)


@pytest.fixture
def partition(register):
    return register()


def known_to_transfer_queue(client, partition):
    engine = client._engine
    return engine.run("list", engine.client.async_kv_list, partition).get(partition, {})


UNITS = ["TransferQueueStorageUnit#0", "TransferQueueStorageUnit#1"]


def bytes_held(client, backend, field):
    """Return the bytes that a field's values use; on packed, those of all fields.

    Each test that calls this uses a field name that no other test uses.
    """
    if backend == "packed":
        return sum(unit.used for unit in client.inspector.list_storage())

    def held(unit):
        values = unit.storage_data.field_data.get(field, {}).values()
        storages = [value.untyped_storage() for value in values]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    return sum(ask(name, held) for name in UNITS)


# A clear of packed rows needs no unit.
@pytest.mark.parametrize("backend", ["simple"], indirect=True, scope="module")
def test_clear_after_a_stopped_unit_resumes_frees_its_rows(owner, hasty, partition, backend):
    owner.put_samples(["a", "b", "c"], partition, batch(3, field="stopped"))
    pid = pid_of(UNITS[0])
    stop(pid)
    try:
        with pytest.raises(DeadlineExceededError, match="clear_samples"):
            hasty.clear_samples(["a", "b"], partition)
    finally:
        os.kill(pid, signal.SIGCONT)
    owner.clear_samples(["c"], partition)
    assert known_to_transfer_queue(owner, partition) == {}
    assert bytes_held(owner, backend, "stopped") == 0


def test_rows_under_a_read_are_not_replaced(owner, peer, register, monkeypatch):
    first, second = register(), register()
    resolved, proceed = Event(), Event()
    read = peer._store.read

    def late_read(*arguments):
        resolved.set()
        assert proceed.wait(TIMEOUT_S)
        return read(*arguments)

    monkeypatch.setattr(peer._store, "read", late_read)
    owner.put_samples(["a", "b"], first, batch(2, 0.0))
    with ThreadPoolExecutor(2) as pool:
        reading = pool.submit(peer.get_samples, ["a", "b"], first, ["x"])
        try:
            assert resolved.wait(TIMEOUT_S)
            clearing = pool.submit(owner.clear_samples, ["a", "b"], first)
            until(lambda: peer.inspector.count_samples(first, "train", ["x"]).cleared == 2)
            peer.put_samples([f"s{i}" for i in range(8)], second, batch(8, 1.0))
            assert not clearing.done()
        finally:
            proceed.set()
        assert torch.equal(reading.result(TIMEOUT_S)["x"], torch.zeros(2, 4))
        clearing.result(TIMEOUT_S)


def lose_notifications(client, monkeypatch):
    async def lose(request):
        return None

    manager = client._engine.client.storage_manager
    monkeypatch.setattr(manager, "_notify_and_wait", lose)


def test_lost_notification_hides_no_sample(owner, peer, partition, backend, monkeypatch):
    with monkeypatch.context() as patch:
        lose_notifications(peer, patch)
        if backend == "simple":
            with pytest.raises(UnavailableError, match="did not acknowledge fields"):
                peer.put_samples(["a", "b"], partition, batch(2))
            assert owner.inspector.count_samples(partition, "train", ["x"]).put == 0
            patch.undo()
        peer.put_samples(["a", "b"], partition, batch(2))
    assert owner.get_samples(["a", "b"], partition, ["x"]).batch_size == (2,)
    assert owner.claim_meta(partition, "train", ["x"], 2, timeout_s=TIMEOUT_S).size == 2
    owner.clear_samples(["a", "b"], partition)
    assert known_to_transfer_queue(owner, partition) == {}


def refuse_to_store(client, backend, monkeypatch):
    """Make puts fail in their last step before they become visible."""

    def refuse(*arguments):
        raise UnavailableError("not now")

    async def refuse_notification(*arguments):
        raise RuntimeError("not now")

    if backend == "packed":
        monkeypatch.setattr(client._store._units, "write", refuse)
    else:
        manager = client._engine.client.storage_manager
        monkeypatch.setattr(manager, "notify_data_update", refuse_notification)


@pytest.mark.parametrize("why", ["capacity", "store"])
def test_failed_put_blocks_no_consumption_and_keeps_no_memory(
    owner, hasty, partition, backend, monkeypatch, why
):
    if why == "capacity":
        with pytest.raises(CapacityExceeded, match="9 new samples, 0 of 8 held"):
            hasty.put_samples([f"s{i}" for i in range(9)], partition, batch(9))
    else:
        refuse_to_store(hasty, backend, monkeypatch)
        with pytest.raises(UnavailableError, match="not now"):
            hasty.put_samples(["s0", "s1"], partition, batch(2, field="refused"))
    owner.put_samples(["s1", "s2"], partition, batch(2))
    assert owner.claim_meta(partition, "train", ["x"], 8, blocking=False).size == 2
    assert owner.check_consumption_status(partition, ["train"])
    owner.clear_samples(["s1", "s2"], partition)
    assert known_to_transfer_queue(owner, partition) == {}
    assert bytes_held(owner, backend, "refused") == 0


def test_consumption_completes_with_fields_of_tagged_samples(owner, partition):
    owner.put_samples(["a"], partition, tags=[{"reward": 1}])
    owner.put_samples(["b"], partition, batch(1))
    assert owner.claim_meta(partition, "train", ["x"], 8, blocking=False).sample_ids == ["b"]
    assert not owner.check_consumption_status(partition, ["train"])
    owner.put_samples(["a"], partition, batch(1))
    assert owner.claim_meta(partition, "train", ["x"], 8, blocking=False).sample_ids == ["a"]
    assert owner.check_consumption_status(partition, ["train"])


@pytest.mark.parametrize("cleared", [slice(0, 4), slice(0, 8, 2), slice(1, 8, 2)], ids=str)
def test_all_capacity_is_usable_after_any_clear(owner, register, cleared):
    first, second = register(), register()
    ids = [f"s{i}" for i in range(8)]
    owner.put_samples(ids, first, batch(8))
    owner.clear_samples(ids[cleared], first)
    # A row's unit depends on its row number. Another partition uses one number, so the later rows
    # get other units.
    owner.put_samples(["t0"], second, batch(1))
    owner.put_samples(["t1", "t2", "t3"], first, batch(3))
    assert owner.get_samples(["t3"], first, ["x"]).batch_size == (1,)


class Opinion:
    """A class that the storage units cannot import."""


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (TensorDict({"y": torch.ones(1)}, batch_size=[1]), "'o'.*nested TensorDict"),
        ([Opinion()], "'o'.*Opinion"),
    ],
    ids=["nested", "class"],
)
def test_unstorable_value_is_refused_by_field_name(owner, partition, value, named):
    fields = TensorDict({"o": value, "x": torch.ones(1)}, batch_size=[1])
    with pytest.raises(InvalidRequestError, match=named):
        owner.put_samples(["a"], partition, fields)
    assert owner.inspector.count_samples(partition, "train", ["x"]).put == 0


def test_rows_are_freed_one_by_one(owner, partition, backend):
    ids = [f"s{i}" for i in range(8)]
    owner.put_samples(ids, partition, TensorDict({"rows": torch.ones(8, 1024)}, batch_size=[8]))
    before = bytes_held(owner, backend, "rows")
    owner.clear_samples(ids[1:], partition)
    assert owner.get_samples(["s0"], partition, ["rows"])["rows"].sum() == 1024
    after = bytes_held(owner, backend, "rows")
    # A unit of TransferQueue (`simple`) keeps all rows of a put in one buffer.
    assert after <= before / 8 if backend == "packed" else after > before / 8


def test_controller_does_not_grow_with_steps(owner):
    def footprint(controller):
        return (
            sorted(controller.partitions),
            controller.index_manager.global_index_counter,
            len(controller.index_manager.reusable_indexes),
        )

    def step(number):
        name = f"step-{number}"
        owner.register_partition(name, ["x"], 8, ["train"])
        owner.put_samples([f"s{i}" for i in range(8)], name, batch(8))
        owner.claim_meta(name, "train", ["x"], 8)
        owner.clear_samples(["s0", "s1"], name)
        owner.clear_samples(None, name)

    step(0)
    before = ask("TransferQueueController", footprint)
    for number in range(1, 6):
        step(number)
    assert ask("TransferQueueController", footprint) == before
