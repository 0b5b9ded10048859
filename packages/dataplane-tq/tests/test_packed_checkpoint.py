"""Checkpoints of the rows of TransferQueue's own clients on the packed backend.

Imports internals: the checkpoint is behind TransferQueue's storage manager.
"""

from itertools import count, islice

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_store import opened
from tensordict import NonTensorStack, TensorDict

from dataplane_core import CapacityExceeded, CheckpointError, MissingDataError, StorageSummary
from dataplane_core.checkpoint.folder import write_folder
from dataplane_tq.directory import protocol as p
from dataplane_tq.packed.layout import FieldLayout


def fields(names, ids, version):
    """Return dense, ragged and object columns whose values differ by sample and version."""
    columns = {
        "dense": torch.tensor([[i, version, 7] for i in ids]),
        "ragged": torch.nested.as_nested_tensor(
            [torch.full((i % 5,), version, dtype=torch.int16) for i in ids], layout=torch.jagged
        ),
        "text": NonTensorStack(*[f"{i} of {version}" for i in ids]),
        "large": torch.full((len(ids), 200), version, dtype=torch.float64),
    }
    return TensorDict({name: columns[name] for name in names}, batch_size=[len(ids)])


def plain(column):
    if isinstance(column, torch.Tensor):
        return [row.tolist() for row in column.unbind()]
    return column.tolist()


def used(store):
    units = store._link.ask("test", p.ListStorage(), list[StorageSummary])
    return sum(unit.used for unit in units)


class Model:
    """The rows that a store should have: values and cells by partition, sample and field."""

    def __init__(self, store):
        self.store = store
        self.rows = {}
        self.version = 0

    def put(self, partition, ids, names):
        self.version += 1
        data = fields(names, ids, self.version)
        cells = self.store.put(partition, ids, data, {}, lambda cells: None)
        for name in names:
            values = plain(data[name])
            for i, value, cell in zip(ids, values, cells[name].tolist(), strict=True):
                self.rows.setdefault((partition, i), {})[name] = (value, cell)

    def clear(self, partition, ids):
        ids = [i for i in ids if self.rows.pop((partition, i), None) is not None]
        if ids:
            self.store.clear(partition, ids, {})

    def check(self, store):
        """Check all values, with the cells that the puts before the checkpoint returned."""
        for (partition, i), row in self.rows.items():
            known = {name: np.array([cell]) for name, (_, cell) in row.items()}
            read = store.get(partition, [i], list(row), known)
            assert {name: plain(column) for name, column in read.items()} == {
                name: [value] for name, (value, _) in row.items()
            }


PARTITIONS = st.sampled_from(["train", "val/../x"])
IDS = st.lists(st.integers(0, 7), min_size=1, max_size=6, unique=True)
NAMES = st.lists(
    st.sampled_from(["dense", "ragged", "text", "large"]), min_size=1, max_size=4, unique=True
)
STEPS = st.lists(
    st.tuples(st.just("put"), PARTITIONS, IDS, NAMES)
    | st.tuples(st.just("clear"), PARTITIONS, IDS),
    max_size=8,
)


@settings(max_examples=40, deadline=None)
@given(STEPS, STEPS)
def test_restored_store_has_the_rows_of_the_saved_one(tmp_path_factory, before, after):
    checkpoint = tmp_path_factory.mktemp("checkpoint")
    with opened(1 << 16, 1 << 16) as saved, opened(1 << 17) as restored:
        model = Model(saved)
        for operation, *arguments in before:
            getattr(model, operation)(*arguments)
        saved.save(checkpoint)
        restored.load(checkpoint)
        model.check(restored)
        model.check(saved)
        model.store = restored
        for operation, *arguments in after:
            getattr(model, operation)(*arguments)
        model.check(restored)
        for partition in {partition for partition, _ in model.rows}:
            model.clear(partition, [i for other, i in list(model.rows) if other == partition])
        assert used(restored) == 0


def test_load_replaces_what_was_put_since(tmp_path):
    with opened(1 << 20) as store:
        model = Model(store)
        model.put("train", [0, 1], ["dense"])
        store.save(tmp_path)
        for partition, ids in (("train", [1, 2]), ("other", [5])):
            store.put(partition, ids, fields(["dense", "text"], ids, 99), {}, lambda cells: None)
        store.load(tmp_path)
        model.check(store)
        for partition, index in (("train", 2), ("other", 5)):
            with pytest.raises((MissingDataError, LookupError)):
                store.get(partition, [index], ["dense"], {})


def test_changed_or_older_checkpoint_changes_nothing(tmp_path):
    with opened(1 << 20) as store:
        model = Model(store)
        model.put("train", [0, 1], ["dense", "text"])
        store.save(tmp_path)
        [file] = (tmp_path / "packed_storage").glob("*.msgpack")
        file.write_bytes(file.read_bytes()[:-1] + b"?")
        with pytest.raises(CheckpointError, match=r"000000\.msgpack.*changed since"):
            store.load(tmp_path)
        with write_folder(tmp_path / "packed_storage") as writer:
            writer.finish({"partitions": ["tq:train"]})  # as before cells became block numbers
        with pytest.raises(CheckpointError, match=r"packed_storage: format 1; expected 2; load it"):
            store.load(tmp_path)
        model.check(store)


@pytest.mark.parametrize(
    ("sample_ids", "data", "copies"),
    [
        ([], [b""], 1),
        (["0", "1"], [bytes(8)], 1),
        (["0"], [bytes(9)], 1),
        (["0"], [], 1),
        (["0"], [bytes(8)] * 2, 2),  # one sample has two blocks of a field
    ],
)
def test_malformed_file_is_a_checkpoint_error(tmp_path, sample_ids, data, copies):
    layout = FieldLayout("x", "torch.int64", False, (), b"", 8, 1)
    block = [7, layout, sample_ids]
    file = {"partition_id": "tq:train", "blocks": [block] * copies, "data": data}
    with write_folder(tmp_path / "packed_storage") as writer:
        writer.add("000000.msgpack", msgspec.msgpack.encode(file))
        writer.finish({"format": 2, "partitions": ["tq:train"]})
    with opened(1 << 20) as store:
        with pytest.raises(CheckpointError, match=r"000000\.msgpack"):
            store.load(tmp_path)
        assert used(store) == 0


@pytest.mark.parametrize(
    ("units", "before", "cleared", "last"),
    [
        (1, [4], [0, 2, 3], 3),  # without the cleared rows, 4 of the unit's 5 rows
        (2, [3, 3, 2], [3, 4, 5], 5),  # the last put filled a unit, but is split by the restore
    ],
)
def test_full_store_fits_into_units_of_the_same_size(tmp_path, units, before, cleared, last):
    rows = count()
    capacities = [5 * 1600] * units
    with (
        opened(*capacities) as saved,
        opened(*capacities) as restored,
        opened(*capacities) as again,
    ):
        model = Model(saved)
        for size in before:
            model.put("train", list(islice(rows, size)), ["large"])
        model.clear("train", cleared)
        model.put("train", list(islice(rows, last)), ["large"])
        assert used(saved) >= 0.8 * sum(capacities)
        saved.save(tmp_path / "first")
        restored.load(tmp_path / "first")
        model.check(restored)
        restored.save(tmp_path / "second")
        again.load(tmp_path / "second")
        model.check(again)
        assert used(again) == used(saved)


def test_large_columns_are_saved_in_several_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr("dataplane_tq.storage.packed_checkpoint._MAX_BLOCK_BYTES", 40)
    monkeypatch.setattr("dataplane_tq.storage.packed_checkpoint._MAX_VALUE_BYTES", 1600)
    with opened(1 << 20) as saved, opened(1 << 20) as restored:
        model = Model(saved)
        model.put("train", list(range(9)), ["dense", "ragged", "text", "large"])
        model.clear("train", [4])
        model.put("train", [2, 5], ["dense"])
        saved.save(tmp_path)
        [file] = (tmp_path / "packed_storage").glob("*.msgpack")
        sizes = [len(data) for data in msgspec.msgpack.decode(file.read_bytes())["data"]]
        assert {size for size in sizes if size > 40} == {1600}  # one row
        restored.load(tmp_path)
        model.check(restored)


def test_row_too_large_for_a_checkpoint_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("dataplane_tq.storage.packed_checkpoint._MAX_VALUE_BYTES", 1599)
    with opened(1 << 20) as store:
        Model(store).put("train", [0, 1], ["large"])
        with pytest.raises(CheckpointError, match="field 'large' has 1600 bytes; expected at most"):
            store.save(tmp_path)
        assert not (tmp_path / "packed_storage").exists()


def test_store_that_is_too_small_is_left_empty(tmp_path):
    with opened(1 << 20) as saved, opened(1 << 12) as small, opened(1 << 20, samples=1) as few:
        Model(saved).put("train", [0, 1, 2, 3], ["large"])
        saved.save(tmp_path)
        for store in (small, few):
            with pytest.raises(CapacityExceeded):
                store.load(tmp_path)
            assert used(store) == 0
            with pytest.raises((MissingDataError, LookupError)):
                store.get("train", [0], ["large"], {})


def test_large_stores_are_saved_in_several_files_during_clears(tmp_path, monkeypatch):
    monkeypatch.setattr("dataplane_tq.storage.packed_checkpoint._FILE_BYTES", 1 << 12)
    monkeypatch.setattr("dataplane_tq.storage.packed_checkpoint._SAMPLES_AT_ONCE", 10)
    with opened(1 << 20) as saved, opened(1 << 20) as restored:
        model = Model(saved)
        for i in range(30):
            model.put("train", [2 * i, 2 * i + 1], ["large", "text"])
        cleared = iter([0, 59, 5, 30, 17, 1])
        ask = saved._link.ask

        def ask_then_clear(what, request, answer):
            page = ask(what, request, answer)
            if isinstance(request, p.ListSamples):
                model.clear("train", [next(cleared)])
            return page

        monkeypatch.setattr(saved._link, "ask", ask_then_clear)
        saved.save(tmp_path)
        assert len(list((tmp_path / "packed_storage").glob("*.msgpack"))) > 5
        restored.load(tmp_path)
        model.check(restored)
