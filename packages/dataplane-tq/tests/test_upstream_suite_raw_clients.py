"""TransferQueue's own clients on the packed backend, beyond upstream's tests.

Imports internals: TransferQueue loads the modules of the packed backend by name, and tests make
requests of the backend to the controller fail.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import ray
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from tensordict import NonTensorStack, TensorDict
from transfer_queue import interface, metadata
from transfer_queue.metadata import BatchMeta, extract_field_schema
from transfer_queue.storage.managers.simple_storage_manager import AsyncSimpleStorageManager

from dataplane_core import (
    CapacityExceeded,
    ConfigError,
    InvalidRequestError,
    InvalidTypeError,
    MissingDataError,
    StorageSummary,
    UnavailableError,
)
from dataplane_core.tensors.rows import collate_rows
from dataplane_tq.directory import protocol
from dataplane_tq.storage import clear_marks
from dataplane_tq.storage import packed_bootstrap as bootstrap
from dataplane_tq.storage import packed_manager as manager
from dataplane_tq.storage.new_keys import exchange
from dataplane_tq.storage.packed_rows import as_transfer_queue

pytestmark = pytest.mark.slow

chunk_by_partition = BatchMeta.chunk_by_partition  # as TransferQueue has it

SECTION = {
    "num_storage_units": 2,
    "global_segment_size": 16 << 20,
    "packed_transport": "auto",
    "ack_timeout_ms": 10_000,
}


def config(**section):
    backend = {"storage_backend": "PackedStorage", "PackedStorage": {**SECTION, **section}}
    return OmegaConf.create({"controller": {"polling_mode": True}, "backend": backend})


@pytest.fixture(scope="module")
def client(cluster):
    tq.init(config())
    yield tq.get_client()
    tq.close()


@pytest.fixture
def partition_id(client, request):
    yield request.node.name
    client.clear_partition(request.node.name)


def column(values, name="x"):
    return TensorDict({name: torch.tensor(values)}, batch_size=[len(values)])


def fetched(client, partition_id, fields=("x",), count=2):
    return client.get_meta(
        data_fields=list(fields),
        batch_size=count,
        partition_id=partition_id,
        mode="force_fetch",
        task_name="reader",
    )


def used_bytes(client):
    link = client.storage_manager._raw._link
    return sum(unit.used for unit in link.ask("", protocol.ListStorage(), list[StorageSummary]))


@pytest.fixture
def stale(client, partition_id):
    """Return a meta whose rows were cleared, and whose indexes other samples now have.

    TransferQueue reuses indexes in the order of their release, so these tests come first.
    """
    client.put(column([[1, 1], [2, 2]]), partition_id=partition_id)
    meta = fetched(client, partition_id)
    client.clear_samples(fetched(client, partition_id))
    client.put(column([[8, 8], [9, 9]]), partition_id=partition_id)
    assert sorted(fetched(client, partition_id).global_indexes) == sorted(meta.global_indexes)
    return meta


def values(client, partition_id):
    rows = client.get_data(fetched(client, partition_id))["x"].unbind()
    return sorted(row.tolist() for row in rows)


def test_stale_meta_gets_no_other_samples_rows(client, partition_id, stale):
    with pytest.raises(MissingDataError, match="get the meta again"):
        client.get_data(stale)


def test_stale_meta_puts_into_no_other_samples_rows(client, partition_id, stale):
    for name in ("x", "y"):
        with pytest.raises(MissingDataError, match="get the meta again"):
            client.put(column([[3, 3], [4, 4]], name), metadata=stale.select_samples([0, 1]))
    assert values(client, partition_id) == [[8, 8], [9, 9]]


def claimed(client, partition_id, fields=("x",), count=2):
    task_name = f"claim of {fields}"
    return client.get_meta(list(fields), count, partition_id, mode="fetch", task_name=task_name)


def check_refused_clear(client, partition_id, stale):
    with pytest.raises(RuntimeError, match="get the meta again"):
        client.clear_samples(stale)
    rows = client.get_data(claimed(client, partition_id))["x"].unbind()
    assert sorted(row.tolist() for row in rows) == [[8, 8], [9, 9]]


def test_stale_meta_clears_no_other_samples(client, partition_id, stale):
    check_refused_clear(client, partition_id, stale)


@pytest.mark.parametrize("failures", [[TimeoutError], [RuntimeError, RuntimeError]])
def test_refused_clear_outlasts_failed_requests(client, partition_id, stale, monkeypatch, failures):
    left = iter(failures)

    def failing(*request):
        if failure := next(left, None):
            raise failure
        return exchange(*request)

    monkeypatch.setattr(clear_marks, "exchange", failing)
    check_refused_clear(client, partition_id, stale)
    assert next(left, None) is None


def test_refused_removal_of_marks_is_tried_again(client, partition_id, stale, monkeypatch):
    refused = []

    def absent_first(manager, request, response, body, timeout_s):
        if request == "NOTIFY_DATA_UPDATE" and not refused:
            refused.append(body := {**body, "partition_id": "absent"})
        return exchange(manager, request, response, body, timeout_s)

    monkeypatch.setattr(clear_marks, "exchange", absent_first)
    check_refused_clear(client, partition_id, stale)


def test_clear_refused_in_one_partition_leaves_the_others(client, partition_id, stale):
    there = f"{partition_id}-there"
    other = client.put(column([[5, 5]]), partition_id=there)
    with pytest.raises(RuntimeError, match="get the meta again"):
        client.clear_samples(BatchMeta.concat([stale, other]))
    for name, count in ((partition_id, 2), (there, 1)):
        assert claimed(client, name, count=count).size == count
    for name in (partition_id, there):
        client.clear_partition(name)


def test_refused_clear_leaves_every_sample_as_it_was(client, partition_id):
    """One of the rows was reused, one has more fields, and one is in another partition."""
    there = f"{partition_id}-there"
    mixed = [client.put(column([[i]]), partition_id=partition_id) for i in (1, 2)]
    mixed.append(client.put(column([[0]]), partition_id=there))
    more = TensorDict({"y": torch.ones(1, 3), "text": NonTensorStack("a")}, [1])
    client.put(more, metadata=mixed[1].select_samples([0]))
    client.clear_samples(mixed[0].select_samples([0]))
    client.put(column([[8, 9, 9]]), partition_id=partition_id)
    before = fetched(client, partition_id)
    with pytest.raises(RuntimeError, match="1 of 2 rows were overwritten or reused"):
        client.clear_samples(BatchMeta.concat(mixed))
    assert fetched(client, partition_id).field_schema == before.field_schema
    rows = client.get_data(claimed(client, partition_id))["x"].unbind()
    assert sorted(row.tolist() for row in rows) == [[2], [8, 9, 9]]
    [text] = client.get_data(claimed(client, partition_id, ["y", "text"], 1))["text"].tolist()
    assert text == "a"
    assert claimed(client, there, count=1).size == 1
    for name in (partition_id, there):
        client.clear_partition(name)


def test_repeated_clear_is_ignored(client, partition_id):
    meta = client.put(column([[1], [2]]), partition_id=partition_id)
    for _ in range(2):
        client.clear_samples(meta.select_samples([0, 1]))
    client.put(column([[3], [4]]), partition_id=partition_id)
    assert values(client, partition_id) == [[3], [4]]


def test_meta_of_cleared_rows_is_refused(client, partition_id):
    allocated = client.get_meta(["x"], 1, partition_id, mode="insert")
    meta = client.put(column([[1]]), partition_id=partition_id)
    client.clear_partition(partition_id)
    with pytest.raises(MissingDataError):
        client.get_data(meta)
    with pytest.raises(UnavailableError, match="controller refused their report"):
        client.put(column([[3]]), metadata=allocated)


def as_sent(value):
    """Return ``value`` with each tuple as a list: the queue's messages have no tuples."""
    if isinstance(value, dict):
        return {key: as_sent(each) for key, each in value.items()}
    return [as_sent(each) for each in value] if isinstance(value, (list, tuple)) else value


def test_controller_gets_the_schema_that_transfer_queue_extracts(client, partition_id):
    offsets, rows = torch.tensor([0, 3, 3, 5]), [torch.zeros(n, 2) for n in (2, 1, 4)]
    columns = {
        "one number": torch.zeros(3),
        "dense": torch.zeros(3, 4, dtype=torch.bfloat16),
        "objects": NonTensorStack("a", 1, None),
        "jagged": torch.nested.nested_tensor_from_jagged(torch.zeros(5, 2), offsets),
        "with holes": torch.nested.nested_tensor_from_jagged(
            torch.zeros(9), torch.tensor([0, 3, 6, 9]), torch.tensor([1, 2, 3])
        ),
        "strided": torch.nested.nested_tensor(rows, layout=torch.strided),
    }
    data = TensorDict(columns, batch_size=[3])
    indexes = client.put(data, partition_id=partition_id).global_indexes
    meta = fetched(client, partition_id, columns, 3)
    meta = meta.select_samples([meta.global_indexes.index(index) for index in indexes])
    assert as_sent(meta.field_schema) == as_sent(extract_field_schema(data))
    meta.update_custom_meta([{"scores": [1]}] * 3)
    [chunk] = meta.chunk_by_partition()
    chunk.custom_meta[0]["scores"].append(2)
    chunk.field_schema["jagged"]["per_sample_shapes"].clear()
    assert meta.custom_meta[0] == {"scores": [1]}
    assert len(meta.field_schema["jagged"]["per_sample_shapes"]) == 3


@pytest.mark.parametrize("jagged", [True, False])
def test_rows_that_do_not_match_the_meta_are_refused(client, partition_id, jagged):
    meta = client.put(column([[1], [2]]), partition_id=partition_id)
    none = torch.zeros(0, 1)
    if jagged:
        none = torch.nested.nested_tensor_from_jagged(torch.zeros(0), torch.tensor([0]))
    with pytest.raises(InvalidRequestError, match="expected 2"):
        client.put(TensorDict({"x": none}, batch_size=[0]), metadata=meta)
    assert values(client, partition_id) == [[1], [2]]


def test_partly_overwritten_meta_is_still_readable(client, partition_id):
    both = TensorDict({"x": torch.ones(2, 3), "y": torch.ones(2, 3)}, batch_size=[2])
    meta = client.put(both, partition_id=partition_id)
    older = meta.select_samples([0, 1])
    client.put(column([[5.0], [6.0]]), metadata=meta)
    fields = client.get_data(older)
    assert [row.tolist() for row in fields["x"]] == [[5.0], [6.0]]
    assert [row.tolist() for row in fields["y"]] == [[1.0] * 3] * 2


def test_meta_from_before_the_put_is_refused(client, partition_id):
    allocated = client.get_meta(
        data_fields=["x"], batch_size=2, partition_id=partition_id, mode="insert"
    )
    before = allocated.select_samples([0, 1])
    client.put(column([[1], [2]]), metadata=allocated)
    before.add_fields(column([[1], [2]]))
    with pytest.raises(MissingDataError, match="after the put"):
        client.get_data(before)


def test_one_call_reads_or_clears_rows_of_several_partitions(client, partition_id):
    data = TensorDict(
        {"x": torch.arange(4).view(2, 2), "text": NonTensorStack("a", "b")}, batch_size=[2]
    )
    there = client.put(data, partition_id=f"{partition_id}-there")
    here = client.put(data, partition_id=partition_id)
    mixed = BatchMeta.concat([there.select_samples([1]), here.select_samples([0])])
    fields = client.get_data(mixed)
    assert [row.tolist() for row in fields["x"]] == [[2, 3], [0, 1]]
    assert list(fields["text"]) == ["b", "a"]
    client.clear_samples(mixed)
    with pytest.raises(MissingDataError):
        client.get_data(mixed)
    client.clear_partition(f"{partition_id}-there")


def test_clear_frees_the_bytes(client, partition_id):
    before = used_bytes(client)
    client.put(column([[1.0] * 1000] * 8), partition_id=partition_id)
    assert used_bytes(client) > before
    client.clear_partition(partition_id)
    assert used_bytes(client) == before


def test_rows_of_a_writer_that_died_before_its_report_are_cleared(client, partition_id):
    before = used_bytes(client)
    meta = client.put(column([[1], [2]]), partition_id=partition_id)

    @ray.remote(num_cpus=1, max_retries=0)
    def overwrite(meta, data):
        import transfer_queue

        from dataplane_tq.storage.packed_manager import PackedStorageManager

        transfer_queue.init()
        PackedStorageManager._report = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        transfer_queue.get_client().put(data, metadata=meta)

    with pytest.raises(ray.exceptions.WorkerCrashedError):
        ray.get(overwrite.remote(meta, column([[5], [6]])), timeout=120)
    with pytest.raises(MissingDataError, match="get the meta again"):
        client.get_data(fetched(client, partition_id))
    client.clear_partition(partition_id)
    assert used_bytes(client) == before


def test_clear_unblocks_more_puts_than_the_loop_has_threads(client, partition_id):
    store = client.storage_manager
    stored = client.put(column([[0] * (3 << 19)] * 2), partition_id=partition_id)  # 12 of 16 MiB
    blocked = column([[0] * (5 << 17)])
    metas = [client.get_meta(["x"], 1, partition_id, mode="insert") for _ in range(3)]

    async def put_then_clear():
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
        puts = [asyncio.create_task(store.put_data(blocked, meta)) for meta in metas]
        await asyncio.sleep(0)  # each put asks for a thread
        await store.clear_data(stored)
        await asyncio.gather(*puts)

    asyncio.run(put_then_clear())


def test_process_that_only_calls_init_finds_the_manager(client, partition_id):
    client.put(column([[1, 2], [3, 4]]), partition_id=partition_id)

    @ray.remote(num_cpus=1)
    def read(partition_id):
        import transfer_queue

        transfer_queue.init()
        there = transfer_queue.get_client()
        meta = there.get_meta(["x"], 2, partition_id, mode="force_fetch", task_name="elsewhere")
        return sorted(row.tolist() for row in there.get_data(meta)["x"])

    assert ray.get(read.remote(partition_id), timeout=120) == [[1, 2], [3, 4]]


def test_checkpoint_of_the_queue_restores_keys_tags_and_values(client, partition_id, tmp_path):
    fields = TensorDict(
        {"tokens": torch.arange(6).view(2, 3), "text": NonTensorStack("a", {"b": 1})}, [2]
    )
    tags = [{"status": "finished"}, {"status": "running"}]
    tq.kv_batch_put(["u_0", "u_1"], partition_id, fields, tags)
    tq.save_checkpoint(tmp_path / "step_3", metadata={"step": 3})
    assert json.loads((tmp_path / "step_3" / "metadata.json").read_text())["storage_saved"]
    tq.kv_clear(["u_0"], partition_id)
    tq.kv_batch_put(["u_2"], partition_id, fields[:1], [{"status": "finished"}])
    tq.load_checkpoint(tmp_path / "step_3")
    assert tq.kv_list(partition_id)[partition_id] == dict(zip(["u_0", "u_1"], tags, strict=True))
    read = tq.kv_batch_get(["u_1", "u_0"], partition_id)
    assert [row.tolist() for row in read["tokens"]] == [[3, 4, 5], [0, 1, 2]]
    assert read["text"].tolist() == [{"b": 1}, "a"]


class Unsupported:
    """Type that the packed backend does not store."""


def test_refused_put_leaves_no_key_in_the_controller(client, partition_id):
    tq.kv_batch_put(["kept"], partition_id, column([[1]]), [{"status": "old"}])
    tq.kv_batch_put(["tagged"], partition_id, tags=[{"status": "queued"}])
    unsupported = TensorDict({"x": NonTensorStack(*[Unsupported()] * 4)}, [4])
    keys = ["kept", "new", "tagged", "other"]
    tags = [{"status": "refused"}] * len(keys)
    with pytest.raises(InvalidTypeError, match="Unsupported"):
        tq.kv_batch_put(keys, partition_id, unsupported, tags)
    too_large = column([[0] * (4 << 20)])  # 32 MiB of 64-bit integers
    with pytest.raises(CapacityExceeded):
        tq.kv_batch_put(["large"], partition_id, too_large, [{"status": "refused"}])
    with pytest.raises(InvalidRequestError, match="no batch dimension; expected 1 rows"):
        tq.kv_put("row", partition_id, column([[1]])[0], {"status": "refused"})
    assert tq.kv_list(partition_id) == {
        partition_id: {"kept": {"status": "old"}, "tagged": {"status": "queued"}}
    }
    assert client.get_production_status(["x"], partition_id)[0].numel() == 2
    # A retry registers the keys again.
    tq.kv_batch_put(["new"], partition_id, column([[7]]), [{"status": "finished"}])
    read = tq.kv_batch_get(["new", "kept"], partition_id)["x"]
    assert [row.tolist() for row in read] == [[7], [1]]


def test_meta_of_a_refused_put_can_be_put_again(client, partition_id):
    meta = client.get_meta(["x"], 2, partition_id, mode="insert")
    with pytest.raises(InvalidTypeError, match="Unsupported"):
        client.put(TensorDict({"x": NonTensorStack(*[Unsupported()] * 2)}, [2]), metadata=meta)
    client.put(column([[1], [2]]), metadata=meta)
    assert values(client, partition_id) == [[1], [2]]


def test_images_and_other_values_of_verl_are_stored(client, partition_id):
    """verl's prompts carry images; its extra fields carry anything."""
    image = pytest.importorskip("PIL.Image").new("RGB", (2, 2), (255, 0, 0))
    values = [{"images": [image], "seed": 2**70, "span": slice(0, 2)}, {"z": 1j}]
    client.put(TensorDict({"x": NonTensorStack(*values)}, [2]), partition_id=partition_id)
    read = {len(row): row for row in client.get_data(fetched(client, partition_id))["x"].tolist()}
    assert read[1] == {"z": 1j}
    assert (read[3]["seed"], read[3]["span"]) == (2**70, slice(0, 2))
    assert read[3]["images"][0].tobytes() == image.tobytes()


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"allow_pickle": "yes"}, "allow_pickle: found 'yes'; expected true or false"),
        ({"color": "red"}, "color"),
        ({"claim_order": "builtins:len"}, r"found the keys 'claim_order'; expected"),
        ({"packed_transport": "pigeon"}, "packed_transport"),
        ({"global_segment_size": 7}, "global_segment_size"),
    ],
)
def test_wrong_configuration_is_refused_by_name(section, message):
    with pytest.raises(ConfigError, match=message):
        bootstrap.start(config(**section))


def test_logged_configuration_shows_no_token():
    connection = manager.RawConnection(None, {"unit": None}, b"secret", "auto", 1.0)
    assert "secret" not in repr(connection)


@pytest.mark.parametrize(
    "rows",
    [
        [torch.tensor(1), torch.tensor(2)],
        [torch.ones(1), torch.ones(1)],
        [torch.ones(3), torch.zeros(3)],
        [torch.ones(3, 2), torch.zeros(3, 2)],
        [torch.ones(2, 3, 4)],
        [torch.ones(3), torch.zeros(5)],
        [torch.ones(0), torch.zeros(2)],
        [torch.ones(0), torch.zeros(0)],
        [torch.ones(3, 2), torch.zeros(5, 2)],
        [torch.ones(2, 3), torch.zeros(2, 5)],
        [torch.ones(2, 3), torch.zeros(4, 5)],
    ],
    ids=lambda rows: "-".join(str(tuple(row.shape)) for row in rows),
)
def test_forms_equal_those_of_simple_storage(rows):
    expected = AsyncSimpleStorageManager._pack_field_values(rows)
    packed = as_transfer_queue(collate_rows(str(rows[0].dtype), rows))
    assert (packed.is_nested, packed.layout, packed.dtype) == (
        expected.is_nested,
        expected.layout,
        expected.dtype,
    )
    pairs = list(zip(packed.unbind(), expected.unbind(), strict=True))
    assert len(pairs) == len(rows)
    assert all(torch.equal(row, expected_row) for row, expected_row in pairs)


def test_dead_unit_gives_an_error_within_seconds(client):
    """Kill a unit; it stays dead, so no test with this queue may follow."""
    actors = interface._TQ_STORAGE["PackedStorage"]
    ray.kill(actors["DataPlanePackedUnit#0"])
    deadline = time.monotonic() + 20
    # The first puts may still fit into the other unit.
    with pytest.raises(UnavailableError):  # noqa: PT012
        while time.monotonic() < deadline:
            client.put(column([[1, 2]]), partition_id="dead")


def test_queue_starts_from_a_struct_config_and_closes_quietly(cluster, caplog, monkeypatch):
    """verl passes a configuration of Hydra, which refuses new keys."""
    tq.close()
    conf = config(allow_pickle=True)
    OmegaConf.set_struct(conf, True)
    monkeypatch.setattr(logging.getLogger("transfer_queue"), "propagate", True)
    with caplog.at_level(logging.WARNING):
        with pytest.raises(ConfigError, match="color"):
            tq.init(config(color="red"))
        tq.init(conf)  # the failed init left no controller
        unusual = TensorDict({"x": NonTensorStack({1, 2}, threading.Event)}, [2])
        tq.kv_batch_put(["a", "b"], "p", unusual)
        assert tq.kv_batch_get(["b"], "p")["x"].tolist() == [threading.Event]
        assert metadata.extract_field_schema is not extract_field_schema
        tq.close()
    assert metadata.extract_field_schema is extract_field_schema
    assert BatchMeta.chunk_by_partition is chunk_by_partition
    assert not [record for record in caplog.records if "not supported" in record.getMessage()]
