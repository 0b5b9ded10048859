"""Behavior of unmodified TransferQueue 0.1.11 where this package promises more. No Ray.

Each test shows a defect, and its docstring names the work-around of this package, if there is one;
`test_upstream_defects_stay_out.py` and the contract suite test the work-arounds. A failure here
means that upstream changed. Then remove the work-around if it is needless, correct the table in
docs/dataplane-tq.md, and test the new behavior instead.

Controller, storage units and clients are upstream's own classes without Ray's decoration, in this
process, over their real sockets.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import subprocess
import sys
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
from transfer_queue.storage.managers import base, simple_storage_manager
from transfer_queue.storage.managers.simple_storage_manager import StorageUnitTimeout
from transfer_queue.storage.simple_storage import SimpleStorageUnit
from transfer_queue.utils.enum_utils import Role
from transfer_queue.utils.serial_utils import encode
from transfer_queue.utils.zmq_utils import STORAGE_MANAGER_IDENTITY_PREFIX, ZMQServerInfo

pytestmark = pytest.mark.long

Controller = TransferQueueController.__ray_metadata__.modified_class
Unit = SimpleStorageUnit.__ray_metadata__.modified_class

TIMEOUT_S = 20.0
SILENCE_S = 0.5
"""Duration for which a call that never ends is watched, in seconds."""


class Raw:
    """TransferQueue of upstream's parts, and a client.

    The controller cannot be stopped: its daemon threads run until the process exits.
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
        return self.start(call).result(TIMEOUT_S)

    def rows(self, keys, partition, *, create=False):
        return self.run(self.client.async_kv_retrieve_meta(keys, partition, create=create))

    def put(self, keys, partition, **fields):
        meta = self.rows(keys, partition, create=True)
        # The answer has the schema of the stored fields; a put needs the schema of its values.
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
    queues = []

    def make(**options):
        queues.append(Raw(**options))
        return queues[-1]

    yield make
    for raw in queues:
        raw.close()


@pytest.fixture(scope="module")
def raw():
    raw = Raw()
    yield raw
    raw.close()


@pytest.fixture
def partition(raw):
    """Yield the name of a new partition, and clear it afterwards."""
    name = f"p-{uuid.uuid4().hex[:8]}"
    yield name
    raw.rows(["last"], name, create=True)
    raw.run(raw.client.async_clear_partition(name))


def objects(*values):
    return NonTensorStack(*(NonTensorData(value) for value in values))


def ones(count):
    return torch.ones(count, 4)


# A part that is killed.

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
    process.communicate(timeout=TIMEOUT_S)


async def cancel_all():
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def test_calls_hang_when_the_controller_is_killed(raw, controller_process):
    """Work-around: `Engine.wait` asks Ray whether the controller is alive."""
    line = next(line for line in controller_process.stdout if line.startswith("serving "))
    name, ip, ports = json.loads(line.removeprefix("serving "))
    client = raw.connect(ZMQServerInfo(Role.CONTROLLER, name, ip, ports))

    def start(call):
        return asyncio.run_coroutine_threadsafe(call, client._loop)

    try:
        rows = start(client.async_kv_retrieve_meta(["a"], "p", create=True)).result(TIMEOUT_S)
        controller_process.kill()
        controller_process.wait(TIMEOUT_S)
        calls = [
            start(client.async_put(TensorDict({"x": ones(1)}, batch_size=[1]), rows)),
            start(client.async_get_partition_list()),
            start(client.async_get_meta(["x"], 1, "p", task_name="train")),
        ]
        assert client.controller_rpc_pool._timeout is None
        assert not futures.wait(calls, timeout=SILENCE_S).done
        start(cancel_all()).result(TIMEOUT_S)
    finally:
        client.close()


def test_dead_unit_fails_puts_after_ten_minutes_and_clears_never(make_raw, monkeypatch):
    """Work-around: `Engine.wait` asks Ray whether the units are alive."""
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


def test_refused_clear_reports_success_and_leaks_rows(raw, partition, monkeypatch):
    """No work-around: if the clear raises, the directory keeps the rows as orphans."""

    def refuse(keys):
        raise OSError("not now")

    meta = raw.put(["a", "b"], partition, leaked=ones(2))
    for unit in raw.units:
        monkeypatch.setattr(unit.storage_data, "clear", refuse)
    raw.clear(["a", "b"], partition)
    assert raw.keys(partition) == []
    held = [index for unit in raw.units for index in unit.storage_data.field_data.get("leaked", {})]
    assert sorted(held) == sorted(meta.global_indexes)


# Claims that are blocked inside the controller.


def test_claim_with_too_little_data_blocks_the_request_thread(make_raw, monkeypatch):
    """Work-around: the bootstrap sets ``polling_mode=True``."""
    raw = make_raw(units=0, polling_mode=False)
    handler = inspect.unwrap(type(raw.controller).get_metadata)
    slept = []

    class Clock:
        time = staticmethod(time.time)

        @staticmethod
        def sleep(seconds):
            slept.append(seconds)
            raise TimeoutError("enough")

    # The controller's only request thread calls the handlers.
    monkeypatch.setitem(handler.__globals__, "time", Clock)
    with pytest.raises(TimeoutError, match="enough"):
        raw.controller.get_metadata(["x"], "p", task_name="train", batch_size=1)
    assert slept == [5]


# No pin holds a row between its lookup and its read.


def test_read_of_cleared_rows_returns_another_partitions_rows(raw, partition):
    """Work-around: the directory pins rows during a read."""
    resolved = raw.put(["a"], partition, x=torch.zeros(1))
    raw.clear(["a"], partition)
    free = len(raw.controller.index_manager.reusable_indexes)
    other = f"{partition}-other"
    try:
        raw.put([f"b{i}" for i in range(free + 1)], other, x=torch.ones(free + 1))
        assert raw.get(resolved, "x")["x"].tolist() == [1.0]
    finally:
        raw.run(raw.client.async_clear_partition(other))


# A put of another dtype.


def test_put_of_another_dtype_is_accepted_and_read_truncated(raw, partition):
    """Work-around: the ledger checks kinds."""
    raw.put(["a", "b"], partition, x=torch.tensor([[1, 1], [1, 1]]))
    meta = raw.put(["b"], partition, x=torch.tensor([[2.5, 2.5]]))
    assert meta.field_schema["x"]["dtype"] == torch.int64
    rows = raw.get(raw.rows(["a", "b"], partition), "x")["x"].unbind()
    assert [row.tolist() for row in rows] == [[1, 1], [2, 2]]


# A notification that the controller does not answer.


def test_put_with_a_lost_notification_stays_invisible(raw, partition, monkeypatch):
    """Work-around: `rows.store` reads its rows again and checks their fields."""

    def fail(**request):
        raise OSError("not now")

    monkeypatch.setattr(base, "TQ_DATA_UPDATE_RESPONSE_TIMEOUT", 0.2)
    monkeypatch.setattr(raw.controller, "update_production_status", fail)
    meta = raw.put(["a"], partition, x=ones(1))
    assert meta.size == 1
    assert meta.field_names == []
    assert raw.claim(partition, 1).size == 0


# Keys and fields that do not exist.


def test_unknown_keys_and_fields_are_ignored(raw, partition):
    """Work-around: `rows.read` compares the answer with the request."""
    raw.put(["a", "b"], partition, x=ones(2))
    raw.put(["a"], partition, y=ones(1))
    assert raw.rows(["a", "unknown"], partition).size == 1
    meta = raw.rows(["a", "b"], partition)
    assert meta.field_names == ["x"]
    assert set(raw.get(meta, "x", "y", "nothing").keys()) == {"x"}


# A key that is given twice.


def test_duplicate_key_leaves_a_row_that_no_key_clears(raw, partition):
    """Work-around: `check_put` refuses duplicate ids."""
    raw.put(["a", "a"], partition, x=ones(2))
    assert raw.claim(partition, 2).size == 2
    raw.clear(["a"], partition)
    assert raw.keys(partition) == []
    assert raw.claim(partition, 1, task="other").size == 1


# Keys of puts that failed or had tags only.


def test_put_failed_at_capacity_blocks_complete_consumption(make_raw):
    """Work-around: the rows of an abandoned put become orphans, and the next put drops them."""
    raw = make_raw(units=1, capacity=2)
    with pytest.raises(RuntimeError, match="Storage capacity exceeded"):
        raw.put(["a", "b", "c"], "p", x=ones(3))
    assert raw.keys("p") == ["a", "b", "c"]
    raw.put(["a", "b"], "p", x=ones(2))
    assert raw.claim("p", 2).size == 2
    assert not raw.consumed("p")


# Capacity.


def test_free_slots_of_one_unit_cannot_take_rows_of_another(make_raw):
    """Work-around: the directory enforces the capacity of the backend ``simple``."""
    raw = make_raw(units=2, capacity=8)
    keys = [f"s{i}" for i in range(12)]
    raw.rows(keys, "p", create=True)
    raw.put(keys[:8], "p", x=ones(8))
    raw.clear(keys[1:8:2], "p")
    assert sum(unit.storage_data.active_key_count for unit in raw.units) == 4
    with pytest.raises(RuntimeError, match=r"Storage capacity exceeded: 4 existing \+ 2 new > 4"):
        raw.put([keys[8], keys[10]], "p", x=ones(2))


# Claims.


def test_claim_takes_a_complete_batch_or_nothing(raw, partition):
    """Work-around: the directory decides claims."""
    raw.put(["a", "b"], partition, x=ones(2))
    assert raw.claim(partition, 3).size == 0


def test_samples_of_a_dead_claimer_are_lost(raw, partition):
    """Work-around: the directory leases claims."""
    raw.put(["a"], partition, x=ones(1))
    claimer = raw.connect(raw.controller.get_zmq_server_info())
    try:
        claim = claimer.async_get_meta(["x"], 1, partition, task_name="train")
        future = asyncio.run_coroutine_threadsafe(claim, claimer._loop)
        assert future.result(TIMEOUT_S).size == 1
    finally:
        claimer.close()
    raw.put(["a"], partition, x=ones(1))
    assert raw.claim(partition, 1).size == 0


# Values that change in the store.


def test_rows_of_one_shape_are_returned_jagged_unless_scalar(raw, partition):
    """Work-around: `TransferQueueStore.read` collates the rows again."""
    shapes = {"one": (2,), "column": (2, 1), "two": (2, 3), "three": (2, 3, 4)}
    fields = {name: torch.zeros(shape) for name, shape in shapes.items()}
    answer = raw.get(raw.put(["a", "b"], partition, **fields), *fields)
    nested = {name for name in fields if answer[name].is_nested}
    assert nested == {"column", "two", "three"}


class Opinion:
    """A class that only this process can import."""


def test_units_decode_python_values_and_turn_tuples_into_lists(raw, partition):
    """Work-around: object fields are stored as bytes."""
    meta = raw.put(["a", "b"], partition, o=objects(Opinion(), (1, 2)))
    values = [value for unit in raw.units for value in unit.storage_data.field_data["o"].values()]
    assert any(isinstance(value, Opinion) for value in values)
    assert raw.get(meta, "o").get("o").tolist()[1] == [1, 2]


def test_nested_tensordict_is_stored_and_cannot_be_read(raw, partition):
    """Work-around: `split_rows` refuses it."""
    inner = TensorDict({"y": torch.ones(2)}, batch_size=[2])
    meta = raw.put(["a", "b"], partition, inner=inner)
    with pytest.raises(RuntimeError):
        raw.get(meta, "inner")


# Memory.


def test_one_row_keeps_the_memory_of_its_entire_put(raw, partition):
    """No work-around: the docs say so of the backend ``simple``."""
    keys = [f"s{i}" for i in range(512)]
    raw.put(keys, partition, kept=torch.zeros(512, 256))
    raw.clear(keys[1:], partition)
    (row,) = (
        value for unit in raw.units for value in unit.storage_data.field_data["kept"].values()
    )
    assert row.nbytes == 1024
    assert row.untyped_storage().nbytes() == 256 * 1024


def test_empty_partition_stays_listed_with_a_full_size_status(raw):
    """Work-around: `rows.forget` removes it."""
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
        # The call ignores an empty partition.
        assert name in raw.run(raw.client.async_get_partition_list())
        raw.rows(["b"], name, create=True)
        raw.run(raw.client.async_clear_partition(name))
        assert name not in raw.run(raw.client.async_get_partition_list())


# Security.


class Payload:
    """Object that creates a directory when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.mkdir, (self.path,)


@pytest.mark.parametrize("port", ["request_handle_socket", "put_get_socket"])
def test_any_peer_of_a_port_can_run_code(raw, tmp_path, port):
    """No work-around: docs/dataplane-tq.md says so in its section on security."""
    server = raw.controller if port == "request_handle_socket" else raw.units[0]
    info = server.get_zmq_server_info()
    mark = tmp_path / "was-here"
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.setsockopt(zmq.LINGER, 0)
        client.setsockopt(zmq.RCVTIMEO, int(TIMEOUT_S * 1000))
        client.setsockopt(zmq.IDENTITY, f"{STORAGE_MANAGER_IDENTITY_PREFIX}me".encode())
        client.connect(info.to_addr(port))
        client.send_multipart(encode({"body": Payload(mark)}))
        client.recv_multipart()
    assert mark.is_dir()


# Claims before the first put.


def test_claim_works_without_a_placeholder(raw, partition):
    """No work-around: claims need no placeholder row, so `register_partition` writes none."""
    assert raw.claim(partition, 1).size == 0
    raw.put(["a"], partition, x=torch.tensor([1]))
    assert raw.claim(partition, 1).size == 1
