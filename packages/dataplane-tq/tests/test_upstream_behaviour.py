"""What unmodified TransferQueue 0.1.11 does where this package promises more. No Ray.

One section for each defect that the adapter works around, by its number in the list of them; the
other side is in `test_upstream_defects_stay_out.py`. A test here that fails says that upstream
changed: read its docstring, drop the work-around it names if that has become needless, correct the
table in docs/dataplane-tq.md, and turn the test into one of the new behaviour.

Controller, storage units and clients are upstream's own classes without Ray's decoration, in this
process, over their real sockets.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import json
import subprocess
import sys
import threading
import time
import uuid
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import zmq
from tensordict import NonTensorData, NonTensorStack, TensorDict
from transfer_queue.client import TransferQueueClient
from transfer_queue.controller import TransferQueueController
from transfer_queue.sampler import GRPOGroupNSampler
from transfer_queue.storage.managers import base, simple_storage_manager
from transfer_queue.storage.managers.simple_storage_manager import StorageUnitTimeout
from transfer_queue.storage.simple_storage import SimpleStorageUnit
from transfer_queue.utils.enum_utils import Role
from transfer_queue.utils.serial_utils import encode
from transfer_queue.utils.zmq_utils import STORAGE_MANAGER_IDENTITY_PREFIX, ZMQServerInfo

Controller = TransferQueueController.__ray_metadata__.modified_class
Unit = SimpleStorageUnit.__ray_metadata__.modified_class

PATIENCE_S = 20.0
SILENCE_S = 0.5
"""How long a call that never ends is watched."""


class Raw:
    """A TransferQueue of upstream's parts, and a client.

    Its controller cannot be stopped: its daemon threads stay until the process ends.
    """

    def __init__(self, *, units=2, capacity=None, polling_mode=True):
        self.controller = Controller(polling_mode=polling_mode)
        sizes = {"total_storage_size": capacity, "num_data_storage_units": units}
        with ThreadPoolExecutor(max(1, units)) as pool:
            self.units = list(pool.map(Unit, [sizes] * units))
        self.client = self.connect(self.controller.get_zmq_server_info())

    def connect(self, controller_info):
        client = TransferQueueClient(f"raw_{uuid.uuid4().hex[:8]}", controller_info)
        if self.units:
            infos = {unit.storage_unit_id: unit.get_zmq_server_info() for unit in self.units}
            client.initialize_storage_manager("SimpleStorage", {"zmq_info": infos})
        return client

    def start(self, call):
        return asyncio.run_coroutine_threadsafe(call, self.client._loop)

    def run(self, call):
        return self.start(call).result(PATIENCE_S)

    def rows(self, keys, partition, *, create=False):
        return self.run(self.client.async_kv_retrieve_meta(keys, partition, create=create))

    def put(self, keys, partition, **fields):
        meta = self.rows(keys, partition, create=True)
        # The answer holds the schema of what is stored; a put has its own.
        meta = meta.select_fields([])
        self.run(self.client.async_put(TensorDict(fields, batch_size=[len(keys)]), meta))
        return self.rows(keys, partition)

    def get(self, meta, *fields):
        return self.run(self.client.async_get_data(meta.select_fields(list(fields))))

    def claim(self, partition, size, task="train", field="x", **sampling_config):
        return self.run(
            self.client.async_get_meta(
                data_fields=[field],
                batch_size=size,
                partition_id=partition,
                task_name=task,
                sampling_config=sampling_config,
            )
        )

    def keys_of(self, meta, partition):
        return self.run(self.client.async_kv_retrieve_keys(meta.global_indexes, partition))

    def keys(self, partition):
        return list(self.run(self.client.async_kv_list(partition))[partition])

    def clear(self, keys, partition):
        self.run(self.client.async_clear_samples(self.rows(keys, partition)))

    def consumed(self, partition, task="train"):
        return self.run(self.client.async_check_consumption_status(task, partition))

    def close(self):
        self.client.close()
        with ThreadPoolExecutor(max(1, len(self.units))) as pool:
            list(pool.map(Unit.shutdown, self.units))


@pytest.fixture
def make_raw():
    made = []

    def make(**options):
        made.append(Raw(**options))
        return made[-1]

    yield make
    for raw in made:
        raw.close()


@pytest.fixture(scope="module")
def raw():
    raw = Raw()
    yield raw
    raw.close()


@pytest.fixture
def partition(raw):
    """A name that no other test uses; what is put there is cleared afterwards."""
    name = f"p-{uuid.uuid4().hex[:8]}"
    yield name
    raw.rows(["last"], name, create=True)
    raw.run(raw.client.async_clear_partition(name))


def objects(*values):
    return NonTensorStack(*(NonTensorData(value) for value in values))


def ones(count):
    return torch.ones(count, 4)


# 1. A part that is killed.

SERVE = """
import json, threading
from transfer_queue.controller import TransferQueueController
info = TransferQueueController.__ray_metadata__.modified_class().get_zmq_server_info()
print("serving", json.dumps([info.id, info.ip, info.ports]), flush=True)
threading.Event().wait()
"""


@pytest.fixture
def controller_process():
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    yield process
    process.kill()
    process.communicate(timeout=PATIENCE_S)


async def cancel_all():
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def test_calls_hang_when_the_controller_is_killed(raw, controller_process):
    """If they end now, `Engine.wait` need not ask Ray whether the controller lives."""
    said = next(line for line in controller_process.stdout if line.startswith("serving "))
    name, ip, ports = json.loads(said.removeprefix("serving "))
    client = raw.connect(ZMQServerInfo(Role.CONTROLLER, name, ip, ports))

    def start(call):
        return asyncio.run_coroutine_threadsafe(call, client._loop)

    try:
        rows = start(client.async_kv_retrieve_meta(["a"], "p", create=True)).result(PATIENCE_S)
        controller_process.kill()
        controller_process.wait(PATIENCE_S)
        calls = [
            start(client.async_put(TensorDict({"x": ones(1)}, batch_size=[1]), rows)),
            start(client.async_get_partition_list()),
            start(client.async_get_meta(["x"], 1, "p", task_name="train")),
        ]
        assert client.controller_rpc_pool._timeout is None
        assert not futures.wait(calls, timeout=SILENCE_S).done
        start(cancel_all()).result(PATIENCE_S)
    finally:
        client.close()


def test_a_dead_unit_is_an_error_after_ten_minutes_and_a_clear_hides_it(make_raw, monkeypatch):
    """If it is reported at once, `Engine.wait` need not ask Ray whether the units live."""
    manager = simple_storage_manager
    assert manager.TQ_SIMPLE_STORAGE_SEND_RECV_TIMEOUT == 200
    assert manager.TQ_SIMPLE_STORAGE_MAX_ATTEMPTS == 3
    monkeypatch.setattr(manager, "TQ_SIMPLE_STORAGE_SEND_RECV_TIMEOUT", 1)
    monkeypatch.setattr(manager, "TQ_SIMPLE_STORAGE_PROBE_TIMEOUT", 1)
    monkeypatch.setattr(manager, "TQ_SIMPLE_STORAGE_MAX_ATTEMPTS", 1)
    raw = make_raw(units=1)
    raw.put(["a"], "p", x=ones(1))
    raw.units[0].shutdown()
    with pytest.raises(StorageUnitTimeout, match="no answer in 1s during put"):
        raw.put(["a"], "p", x=ones(1))
    raw.clear(["a"], "p")
    assert raw.keys("p") == []


def test_a_clear_that_a_unit_refuses_reports_success_and_leaks_the_rows(
    raw, partition, monkeypatch
):
    """If it raises now, no more is to be done here: the directory keeps what was not dropped."""

    def refuse(keys):
        raise OSError("not now")

    meta = raw.put(["a", "b"], partition, leaked=ones(2))
    for unit in raw.units:
        monkeypatch.setattr(unit.storage_data, "clear", refuse)
    raw.clear(["a", "b"], partition)
    assert raw.keys(partition) == []
    held = [index for unit in raw.units for index in unit.storage_data.field_data.get("leaked", {})]
    assert sorted(held) == sorted(meta.global_indexes)


# 2. Claims that wait inside the controller.


def test_a_claim_with_too_little_data_sleeps_in_the_thread_that_serves_everybody(
    make_raw, monkeypatch
):
    """If it no longer sleeps, the bootstrap's ``polling_mode=True`` is a choice again."""
    raw = make_raw(units=0, polling_mode=False)
    handler = inspect.unwrap(type(raw.controller).get_metadata)
    slept = []

    class Clock:
        time = staticmethod(time.time)

        @staticmethod
        def sleep(seconds):
            slept.append(seconds)
            raise TimeoutError("enough")

    # What answers a request is called by the controller's only request thread.
    monkeypatch.setitem(handler.__globals__, "time", Clock)
    with pytest.raises(TimeoutError, match="enough"):
        raw.controller.get_metadata(["x"], "p", task_name="train", batch_size=1)
    assert slept == [5]


# 3. Nothing holds a row between its resolving and its reading.


def test_a_read_returns_another_partitions_rows_if_its_own_were_cleared_meanwhile(raw, partition):
    """If it raises now, the directory's pins protect reads against our own clears only."""
    resolved = raw.put(["a"], partition, x=torch.zeros(1))
    raw.clear(["a"], partition)
    free = len(raw.controller.index_manager.reusable_indexes)
    other = f"{partition}-other"
    try:
        raw.put([f"b{i}" for i in range(free + 1)], other, x=torch.ones(free + 1))
        assert raw.get(resolved, "x")["x"].tolist() == [1.0]
    finally:
        raw.run(raw.client.async_clear_partition(other))


# 4. A put of another dtype.


def test_a_put_of_another_dtype_is_acknowledged_and_cut_when_it_is_read(raw, partition):
    """If it raises now, the ledger's check of kinds only gives the error its name and its time."""
    raw.put(["a", "b"], partition, x=torch.tensor([[1, 1], [1, 1]]))
    meta = raw.put(["b"], partition, x=torch.tensor([[2.5, 2.5]]))
    assert meta.field_schema["x"]["dtype"] == torch.int64
    rows = raw.get(raw.rows(["a", "b"], partition), "x")["x"].unbind()
    assert [row.tolist() for row in rows] == [[1, 1], [2, 2]]


# 5. A notification that the controller does not answer.


def test_a_put_whose_notification_is_not_answered_succeeds_and_stays_invisible(
    raw, partition, monkeypatch
):
    """If it raises now, `transfer_queue_rows.store` need not look its rows up again."""

    def fail(**request):
        raise OSError("not now")

    monkeypatch.setattr(base, "TQ_DATA_UPDATE_RESPONSE_TIMEOUT", 0.2)
    monkeypatch.setattr(raw.controller, "update_production_status", fail)
    meta = raw.put(["a"], partition, x=ones(1))
    assert meta.size == 1
    assert meta.field_names == []
    assert raw.claim(partition, 1).size == 0


# 6. Keys and fields that are not there.


def test_unknown_keys_and_fields_are_left_out_of_an_answer(raw, partition):
    """If they are errors now, `transfer_queue_rows.read` need not compare what it got."""
    raw.put(["a", "b"], partition, x=ones(2))
    raw.put(["a"], partition, y=ones(1))
    assert raw.rows(["a", "nobody"], partition).size == 1
    meta = raw.rows(["a", "b"], partition)
    assert meta.field_names == ["x"]
    assert set(raw.get(meta, "x", "y", "nothing").keys()) == {"x"}


# 7. A key that is given twice.


def test_a_key_given_twice_leaves_a_row_that_is_claimed_and_that_no_key_clears(raw, partition):
    """If it is refused now, `check_put` only gives the error its name."""
    raw.put(["a", "a"], partition, x=ones(2))
    assert raw.claim(partition, 2).size == 2
    raw.clear(["a"], partition)
    assert raw.keys(partition) == []
    assert raw.claim(partition, 1, task="other").size == 1


# 8. Keys of puts that failed or brought tags alone.


def test_a_put_that_failed_at_capacity_keeps_consumption_from_completing(make_raw):
    """If its keys are gone, the leftovers of a put that was given up need no drop."""
    raw = make_raw(units=1, capacity=2)
    with pytest.raises(RuntimeError, match="Storage capacity exceeded"):
        raw.put(["a", "b", "c"], "p", x=ones(3))
    assert raw.keys("p") == ["a", "b", "c"]
    raw.put(["a", "b"], "p", x=ones(2))
    assert raw.claim("p", 2).size == 2
    assert not raw.consumed("p")


def test_tags_alone_register_a_key_that_keeps_consumption_from_completing(raw, partition):
    """The contract says the same of samples with tags alone; a change here only frees a choice."""
    tagged = raw.rows(["a"], partition, create=True)
    tagged.update_custom_meta([{"reward": 1}])
    raw.run(raw.client.async_set_custom_meta(tagged))
    raw.put(["b"], partition, x=ones(1))
    assert raw.claim(partition, 1).size == 1
    assert not raw.consumed(partition)


# 9. Capacity.


def test_free_slots_of_one_unit_cannot_take_rows_of_another(make_raw):
    """If they can, the backend ``simple`` may leave capacity to the units again."""
    raw = make_raw(units=2, capacity=8)
    keys = [f"s{i}" for i in range(12)]
    raw.rows(keys, "p", create=True)
    raw.put(keys[:8], "p", x=ones(8))
    raw.clear(keys[1:8:2], "p")
    assert sum(unit.storage_data.active_key_count for unit in raw.units) == 4
    with pytest.raises(RuntimeError, match=r"Storage capacity exceeded: 4 existing \+ 2 new > 4"):
        raw.put([keys[8], keys[10]], "p", x=ones(2))


# 10. Claims.


def test_a_claim_takes_the_whole_batch_or_nothing(raw, partition):
    """If it takes what is there, TransferQueue's own claims are worth another look."""
    raw.put(["a", "b"], partition, x=ones(2))
    assert raw.claim(partition, 3).size == 0


def test_what_a_claimer_took_is_gone_with_it_and_a_put_does_not_bring_it_back(raw, partition):
    """If claims are leased now, ours may be entered in the controller as leases."""
    raw.put(["a"], partition, x=ones(1))
    claimer = raw.connect(raw.controller.get_zmq_server_info())
    try:
        claim = claimer.async_get_meta(["x"], 1, partition, task_name="train")
        future = asyncio.run_coroutine_threadsafe(claim, claimer._loop)
        assert future.result(PATIENCE_S).size == 1
    finally:
        claimer.close()
    raw.put(["a"], partition, x=ones(1))
    assert raw.claim(partition, 1).size == 0


# 11. Upstream's sampler of groups.


def test_the_group_sampler_asked_for_a_rank_returns_one_batch_for_ever(make_raw):
    """If each claim gets its own, upstream's sampler is worth another look."""
    raw = make_raw(units=1)
    raw.controller.register_sampler(GRPOGroupNSampler(n_samples_per_prompt=2))
    raw.put(["a_g0", "a_g1", "b_g0", "b_g1"], "p", x=torch.zeros(4))
    raw.put(["c_g0", "c_g1"], "other", x=torch.ones(2))
    first = raw.claim("p", 2, dp_rank=0)
    assert raw.claim("p", 2, dp_rank=0).global_indexes == first.global_indexes
    elsewhere = raw.claim("other", 2, dp_rank=0)
    assert elsewhere.partition_ids == ["other", "other"]
    assert raw.get(elsewhere, "x")["x"].tolist() == [0.0, 0.0]


def test_the_group_sampler_mixes_prompts_once_row_numbers_are_used_again(make_raw):
    """If groups follow their prompts, upstream's sampler is worth another look."""
    raw = make_raw(units=1)
    raw.controller.register_sampler(GRPOGroupNSampler(n_samples_per_prompt=2))
    raw.put(["a_g0", "a_g1", "b_g0", "b_g1"], "p", x=ones(4))
    raw.clear(["a_g1", "b_g0"], "p")
    raw.put(["c_g0", "c_g1"], "p", x=ones(2))
    assert raw.keys_of(raw.claim("p", 2), "p") == ["a_g0", "c_g0"]


# 12. What comes back of values.


def test_rows_of_one_shape_come_back_jagged_unless_they_are_scalars(raw, partition):
    """If they come back dense, `TransferQueueStore.read` need not collate them again."""
    shapes = {"one": (2,), "column": (2, 1), "two": (2, 3), "three": (2, 3, 4)}
    fields = {name: torch.zeros(shape) for name, shape in shapes.items()}
    answer = raw.get(raw.put(["a", "b"], partition, **fields), *fields)
    nested = {name for name in fields if answer[name].is_nested}
    assert nested == {"column", "two", "three"}


class Opinion:
    """A class that only this process can import."""


def test_python_values_are_decoded_inside_the_units_and_tuples_become_lists(raw, partition):
    """If they arrive as they were, object fields need not travel as bytes."""
    meta = raw.put(["a", "b"], partition, o=objects(Opinion(), (1, 2)))
    values = [value for unit in raw.units for value in unit.storage_data.field_data["o"].values()]
    assert any(isinstance(value, Opinion) for value in values)
    assert raw.get(meta, "o").get("o").tolist()[1] == [1, 2]


def test_a_nested_tensordict_is_stored_and_cannot_be_read(raw, partition):
    """If it comes back, `split_rows` may take it."""
    inner = TensorDict({"y": torch.ones(2)}, batch_size=[2])
    meta = raw.put(["a", "b"], partition, inner=inner)
    with pytest.raises(RuntimeError):
        raw.get(meta, "inner")


# 13. Memory.


def test_one_row_keeps_the_memory_of_its_whole_put(raw, partition):
    """If rows are freed one by one, say so of the backend ``simple``."""
    keys = [f"s{i}" for i in range(512)]
    raw.put(keys, partition, kept=torch.zeros(512, 256))
    raw.clear(keys[1:], partition)
    (row,) = (
        value for unit in raw.units for value in unit.storage_data.field_data["kept"].values()
    )
    assert row.nbytes == 1024
    assert row.untyped_storage().nbytes() == 256 * 1024


def test_a_partition_without_rows_stays_listed_and_its_status_spans_every_row_number(raw):
    """If it goes by itself, `transfer_queue_rows.forget` is needless."""
    many = [f"s{i}" for i in range(200)]
    raw.put(many, "large", x=ones(200))
    raw.put(["a"], "small", x=ones(1))
    status = raw.controller.partitions["small"].production_status
    assert status.shape[0] > 200
    for keys, name in ((many, "large"), (["a"], "small")):
        raw.clear(keys, name)
        assert raw.keys(name) == []
        assert name in raw.run(raw.client.async_get_partition_list())
        raw.run(raw.client.async_clear_partition(name))
        # What looks empty is taken for absent.
        assert name in raw.run(raw.client.async_get_partition_list())
        raw.rows(["b"], name, create=True)
        raw.run(raw.client.async_clear_partition(name))
        assert name not in raw.run(raw.client.async_get_partition_list())


# 14. Garbage collection.


def test_no_part_keeps_the_garbage_collector_from_its_long_collections(make_raw):
    """If one does now, measure its latencies again beside the directory's."""
    before = gc.get_freeze_count(), gc.get_threshold()
    make_raw(units=1).put(["a"], "p", x=ones(1))
    assert gc.isenabled()
    assert (gc.get_freeze_count(), gc.get_threshold()) == before


# 15. Security.


class Payload:
    """Makes a directory when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.mkdir, (self.path,)


@pytest.mark.parametrize("port", ["request_handle_socket", "put_get_socket"])
def test_whoever_reaches_a_port_can_run_code_there(raw, tmp_path, port):
    """If a stranger is refused now, correct the section on security of docs/dataplane-tq.md."""
    server = raw.controller if port == "request_handle_socket" else raw.units[0]
    info = server.get_zmq_server_info()
    mark = tmp_path / "was-here"
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
        stranger.setsockopt(zmq.IDENTITY, f"{STORAGE_MANAGER_IDENTITY_PREFIX}me".encode())
        stranger.connect(info.to_addr(port))
        stranger.send_multipart(encode({"body": Payload(mark)}))
        stranger.recv_multipart()
    assert mark.is_dir()


# 16. Exclusive claims, which hold.


def test_concurrent_claimers_share_no_row(raw, partition):
    """If they do, TransferQueue's consumption status is not to be trusted for anything."""
    keys = [f"s{i}" for i in range(96)]
    raw.put(keys, partition, x=ones(96))
    barrier = threading.Barrier(12)

    def claim_until_empty():
        barrier.wait(PATIENCE_S)
        taken = []
        while (meta := raw.claim(partition, 2)).size:
            taken += meta.global_indexes
        return taken

    with ThreadPoolExecutor(12) as pool:
        claims = [pool.submit(claim_until_empty) for _ in range(12)]
        taken = [index for claim in claims for index in claim.result(PATIENCE_S)]
    assert sorted(taken) == sorted(raw.rows(keys, partition).global_indexes)


# 17. Placeholders at registration.


def test_a_partition_needs_no_placeholder_before_it_is_claimed_from(raw, partition):
    """If it does, `register_partition` has to put one."""
    assert raw.claim(partition, 1).size == 0
    raw.put(["a"], partition, x=torch.tensor([1]))
    assert raw.claim(partition, 1).size == 1


def test_a_placeholder_on_a_live_field_changes_its_dtype_unseen(raw, partition):
    """If it is refused, other adapters' placeholders no longer harm what is live."""
    raw.put(["a"], partition, x=torch.tensor([7]))
    meta = raw.put(["a"], partition, x=torch.tensor([0.5]))
    assert meta.field_schema["x"]["dtype"] == torch.int64
    assert raw.get(meta, "x")["x"].tolist() == [0.5]
