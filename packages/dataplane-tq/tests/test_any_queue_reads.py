"""Functions that read TransferQueue's controller while its request thread changes the state.

Imports internals: through Ray, no test can stop the request thread between two steps.
"""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transfer_queue.controller import DataPartitionStatus

from dataplane_tq.any_queue import remote_reads

TIMEOUT_S = 20.0


@pytest.fixture
def status():
    """Partition with two samples that a task has consumed."""
    status = DataPartitionStatus("train")
    for row, key in enumerate(("a", "b")):
        status.global_indexes.add(row)
        status.keys_mapping[key] = row
        status.revert_keys_mapping[row] = key
    flat = {"dtype": torch.float32, "shape": (3,), "is_nested": False, "is_non_tensor": False}
    assert status.update_production_status([0, 1], ["x"], {"x": flat})
    status.mark_consumed("score", [0, 1])
    return status


@pytest.fixture
def controller(status):
    return SimpleNamespace(partitions={"train": status}, sampler=None)


def partition_of(controller):
    (partition,) = remote_reads.read_controller(controller, {})["partitions"].values()
    return partition


def rows_of(controller):
    return np.frombuffer(partition_of(controller)["rows"], dtype=np.int64).tolist()


def test_sample_in_the_middle_of_a_clear_is_gone(controller, status):
    began, end = threading.Event(), threading.Event()

    def wait(_rows):  # after the clear has reset the flags, before it removes the keys
        began.set()
        end.wait(TIMEOUT_S)

    assert rows_of(controller) == [0, 1]
    status.field_metadata["x"].remove_samples = wait
    clear = threading.Thread(target=status.clear_data, args=([0],))
    clear.start()
    try:
        assert began.wait(TIMEOUT_S)
        assert rows_of(controller) == [1]
    finally:
        end.set()
        clear.join(TIMEOUT_S)
    assert rows_of(controller) == [1]


def test_names_with_surrogates_are_looked_up_by_their_text(controller, status):
    controller.partitions["p\ud800"] = status
    status.keys_mapping["k\ud800"] = status.keys_mapping.pop("b")
    status.revert_keys_mapping[1] = "k\ud800"
    (_, name) = remote_reads.read_controller(controller, {})["partitions"]
    assert name == r"p\ud800"
    (sample,) = remote_reads.read_samples(controller, name, [1])
    assert sample[2] == r"k\ud800"
    assert remote_reads.find_row(controller, name, sample[2]) == 1
    assert remote_reads.find_row(controller, name, "k") is None


def test_names_with_the_same_text_do_not_shift_the_flags(controller, status):
    for name in ("a\ud800", r"a\ud800"):
        status.mark_consumed(name, [0])
        status.field_name_mapping[name] = len(status.field_name_mapping)
    status.ensure_fields_capacity(3)
    partition = partition_of(controller)
    assert list(partition["fields"]) == ["x", r"a\ud800"]
    assert partition["tasks"] == ["score", r"a\ud800"]
    for name, expected in (("written", [1, 0, 1, 0]), ("acknowledged", [1, 1, 1, 0])):
        bits = np.unpackbits(np.frombuffer(partition[name], dtype=np.uint8), count=4)
        assert bits.tolist() == expected


def test_type_that_is_reset_during_a_read_is_the_old_one(controller, status):
    class Resetting:
        dtypes = (torch.float32, None)
        shape, is_nested, is_non_tensor = (3,), False, False

        @property
        def dtype(self):
            first, *self.dtypes = self.dtypes
            return first

    status.field_metadata["x"] = Resetting()
    assert partition_of(controller)["fields"]["x"] == ["torch.float32", 2, 24]


def test_sample_that_is_cleared_during_a_read_has_no_key(controller, status):
    class Clearing(dict):
        def __contains__(self, row):
            return self.pop(row, None) is not None

    status.revert_keys_mapping = Clearing(status.revert_keys_mapping)
    assert remote_reads.read_samples(controller, "train", [0, 7]) == [
        [0, hash("a"), "a", {}],
        [7, 0, None, {}],
    ]


def test_origins_of_the_instrumentor_are_no_tags(controller, status):
    status.custom_meta[0] = {"uid": 1, "dataplane.origins": "{}"}
    assert remote_reads.read_samples(controller, "train", [0]) == [[0, hash("a"), "a", {"uid": 1}]]
    assert remote_reads.read_samples(controller, "train", [0], "dataplane.origins", "{}") == []


def test_only_matching_samples_are_returned(controller, status):
    status.custom_meta |= {0: {1: "x\udfff", "uid": None}, 1: {1: 2**70}}
    for tag, value, expected in (
        ("1", r"x\udfff", [0]),
        ("1", str(2**70), [1]),
        ("uid", None, [0]),
        ("uid", 0, []),
        ("other", None, []),
    ):
        matching = remote_reads.read_samples(controller, "train", [0, 1, 7], tag, value)
        assert [row for row, *_ in matching] == expected
