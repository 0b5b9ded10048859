"""Contract tests of putting, getting and clearing."""

from __future__ import annotations

import uuid
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any  # Any: rows of object columns

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from dataplane_core import (
    DataPlaneClient,
    DataPlaneError,
    DuplicateSampleError,
    InvalidRequestError,
    KVBatchMeta,
    MissingDataError,
    PartitionNotFoundError,
    SchemaMismatchError,
)
from dataplane_core.tensors.columns import bytes_of

DTYPES = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
)


def jagged(*rows: torch.Tensor) -> torch.Tensor:
    """Return a jagged tensor of the given rows, which may be empty."""
    offsets = torch.tensor([0, *np.cumsum([len(row) for row in rows])])
    return torch.nested.nested_tensor_from_jagged(torch.cat(rows), offsets)


def objects(*values: Any) -> NonTensorStack:
    """Return a per-row column of Python values."""
    return NonTensorStack(*(NonTensorData(value) for value in values))


def batch(count: int, **fields: Any) -> TensorDict:
    """Return a TensorDict of ``count`` rows."""
    return TensorDict(fields, batch_size=[count])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether dtype, shape and bytes are equal; NaN equals itself."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return bytes_of(a).tobytes() == bytes_of(b).tobytes()


class StoreFixtures:
    """Fixtures that a subclass overrides: ``client``, and ``peer``, a client of the same store."""

    max_wait_s = 20.0
    """Maximum seconds that a test waits for an event; only failing tests wait so long."""

    @contextmanager
    def blocked_claim(
        self, client: DataPlaneClient, partition: str, fields: list[str], size: int
    ) -> Iterator[Future[KVBatchMeta]]:
        """Claim for the task 'train' in a thread; the block makes the samples ready."""
        with ThreadPoolExecutor(1) as pool:
            yield pool.submit(
                client.claim_meta, partition, "train", fields, size, timeout_s=self.max_wait_s
            )

    @pytest.fixture
    def client(self) -> DataPlaneClient:
        raise NotImplementedError("override the fixture 'client'")

    @pytest.fixture
    def peer(self, client: DataPlaneClient) -> DataPlaneClient:
        raise NotImplementedError("override the fixture 'peer'")

    @pytest.fixture
    def partition(self, client: DataPlaneClient) -> str:
        """Register a partition of eight declared samples with the tasks 'logprob' and 'train'."""
        name = f"train-{uuid.uuid4().hex[:8]}"
        client.register_partition(name, ["x", "y"], 8, ["logprob", "train"])
        return name


class StorageContract(StoreFixtures):
    """Contract: reads return exactly what was put, or raise."""

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 3)], ids=str)
    def test_dense_rows_keep_dtype_shape_and_bits(
        self,
        client: DataPlaneClient,
        peer: DataPlaneClient,
        partition: str,
        dtype: torch.dtype,
        shape: tuple[int, ...],
    ) -> None:
        size = torch.Size((4, *shape))
        width = torch.empty(0, dtype=dtype).element_size()
        raw = torch.randint(0, 256, (max(1, size.numel()) * width,), dtype=torch.uint8)
        value = (raw % 2 if dtype == torch.bool else raw).view(dtype).reshape(size)
        client.put_samples(list("abcd"), partition, batch(4, x=value))
        answer = peer.get_samples(list("abcd"), partition, ["x"])
        assert answer.batch_size == (4,)
        assert same_bits(answer["x"], value)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_jagged_rows_keep_dtype_lengths_and_bits(
        self, client: DataPlaneClient, peer: DataPlaneClient, partition: str, dtype: torch.dtype
    ) -> None:
        rows = [torch.arange(n).to(dtype) for n in (3, 0, 1, 5)]
        client.put_samples(list("abcd"), partition, batch(4, x=jagged(*rows)))
        answer = peer.get_samples(list("abcd"), partition, ["x"])["x"]
        assert answer.is_nested
        assert all(same_bits(got, row) for got, row in zip(answer.unbind(), rows, strict=True))

    def test_jagged_rows_of_one_length_come_back_dense(
        self, client: DataPlaneClient, peer: DataPlaneClient, partition: str
    ) -> None:
        client.put_samples(["a", "b"], partition, batch(2, x=jagged(torch.ones(2), torch.zeros(2))))
        answer = peer.get_samples(["b", "a"], partition, ["x"])["x"]
        assert same_bits(answer, torch.tensor([[0.0, 0.0], [1.0, 1.0]]))

    def test_batch_of_only_empty_rows_is_read_back(
        self, client: DataPlaneClient, peer: DataPlaneClient, partition: str
    ) -> None:
        empty = torch.zeros(0, dtype=torch.int64)
        client.put_samples(["a", "b"], partition, batch(2, x=jagged(empty, empty)))
        answer = peer.get_samples(["a", "b"], partition, ["x"])["x"]
        assert same_bits(answer, torch.zeros(2, 0, dtype=torch.int64))

    def test_jagged_rows_may_have_trailing_dimensions(
        self, client: DataPlaneClient, peer: DataPlaneClient, partition: str
    ) -> None:
        rows = [torch.randn(2, 3), torch.randn(4, 3)]
        client.put_samples(["a", "b"], partition, batch(2, x=jagged(*rows)))
        answer = peer.get_samples(["b", "a"], partition, ["x"])["x"].unbind()
        assert same_bits(answer[0], rows[1])
        assert same_bits(answer[1], rows[0])

    def test_row_i_belongs_to_id_i_in_the_requested_order(
        self, client: DataPlaneClient, peer: DataPlaneClient, partition: str
    ) -> None:
        ids = [f"s{i}" for i in range(20)]
        client.put_samples(ids, partition, batch(20, x=torch.arange(20)))
        selected = [ids[i] for i in (13, 2, 19, 2, 0)]
        assert peer.get_samples(selected, partition, ["x"])["x"].tolist() == [13, 2, 19, 2, 0]

    def test_python_values_come_back_per_row(
        self, client: DataPlaneClient, peer: DataPlaneClient, partition: str
    ) -> None:
        values = [{"a": [1, 2.5]}, ["x", None], "text \u0000 \U0001f600", None, 7, True, b"\x80"]
        ids = [f"s{i}" for i in range(len(values))]
        client.put_samples(ids, partition, batch(len(values), x=objects(*values)))
        assert peer.get_samples(ids, partition, ["x"]).get("x").tolist() == values

    def test_object_arrays_are_put_per_row(
        self, client: DataPlaneClient, peer: DataPlaneClient, partition: str
    ) -> None:
        array = np.empty(3, dtype=object)
        array[:] = [{"role": "user"}, ["a"], None]
        client.put_samples(["a", "b", "c"], partition, batch(3, x=array))
        answer = peer.get_samples(["c", "a"], partition, ["x"]).get("x")
        assert answer.tolist() == [None, {"role": "user"}]

    def test_nested_arrays_and_tensors_keep_dtype_and_shape(
        self, client: DataPlaneClient, peer: DataPlaneClient, partition: str
    ) -> None:
        values = [{"image": np.ones((2, 3), np.float32)}, {"ids": torch.tensor([1, 2])}]
        client.put_samples(["a", "b"], partition, batch(2, x=objects(*values)))
        first, second = peer.get_samples(["a", "b"], partition, ["x"]).get("x").tolist()
        assert first["image"].dtype == np.float32
        assert first["image"].tolist() == [[1.0] * 3] * 2
        assert same_bits(second["ids"], torch.tensor([1, 2]))

    def test_a_later_put_adds_fields_and_overwrites(
        self, client: DataPlaneClient, peer: DataPlaneClient, partition: str
    ) -> None:
        client.put_samples(["a", "b"], partition, batch(2, x=torch.tensor([1, 2])))
        peer.put_samples(["b", "a"], partition, batch(2, y=torch.tensor([20.0, 10.0])))
        client.put_samples(["b"], partition, batch(1, x=torch.tensor([3])))
        answer = peer.get_samples(["a", "b"], partition, ["x", "y"])
        assert answer["x"].tolist() == [1, 3]
        assert answer["y"].tolist() == [10.0, 20.0]

    def test_undeclared_fields_may_be_written(
        self, client: DataPlaneClient, peer: DataPlaneClient, partition: str
    ) -> None:
        client.put_samples(["a"], partition, batch(1, surprise=torch.tensor([1])))
        assert peer.get_samples(["a"], partition, ["surprise"])["surprise"].tolist() == [1]

    def test_an_overwrite_may_change_a_rows_length(
        self, client: DataPlaneClient, peer: DataPlaneClient, partition: str
    ) -> None:
        client.put_samples(["a", "b"], partition, batch(2, x=torch.zeros(2, 3)))
        client.put_samples(["a"], partition, batch(1, x=torch.ones(1, 5)))
        rows = peer.get_samples(["a", "b"], partition, ["x"])["x"].unbind()
        assert [row.tolist() for row in rows] == [[1.0] * 5, [0.0] * 3]

    def test_the_same_put_twice_leaves_the_same_state(
        self, client: DataPlaneClient, peer: DataPlaneClient, partition: str
    ) -> None:
        for _ in range(2):
            client.put_samples(["a", "b"], partition, batch(2, x=torch.tensor([1, 2])))
        assert peer.claim_meta(partition, "train", ["x"], 8, blocking=False).size == 2
        assert peer.get_samples(["a", "b"], partition, ["x"])["x"].tolist() == [1, 2]

    def test_the_store_keeps_its_own_copy(self, client: DataPlaneClient, partition: str) -> None:
        value, nested = torch.tensor([1, 2]), {"a": [1]}
        fields = batch(2, x=value, o=objects(nested, nested))
        client.put_samples(["a", "b"], partition, fields)
        value.fill_(9)
        nested["a"].append(2)
        answer = client.get_samples(["a", "b"], partition, ["x", "o"])
        assert answer["x"].tolist() == [1, 2]
        assert answer.get("o").tolist() == [{"a": [1]}, {"a": [1]}]
        answer["x"].fill_(7)
        assert client.get_samples(["a"], partition, ["x"])["x"].tolist() == [1]

    def test_put_returns_a_meta_of_what_was_written(
        self, client: DataPlaneClient, partition: str
    ) -> None:
        tags = [{"reward": 0.5}, {"reward": 1.0}]
        meta = client.put_samples(["a", "b"], partition, batch(2, x=torch.ones(2)), tags)
        assert (meta.partition_id, meta.task_name, meta.sample_ids) == (partition, None, ["a", "b"])
        assert meta.fields == ["x"]
        assert meta.tags == tags
        assert client.put_samples(["a"], partition, tags=[{"k": 1}]).fields is None

    def test_read_without_ids_returns_an_empty_batch(
        self, client: DataPlaneClient, partition: str
    ) -> None:
        assert client.get_samples([], partition, ["x"]).batch_size == (0,)

    def test_get_data_reads_selected_fields_or_those_of_the_meta(
        self, client: DataPlaneClient, partition: str
    ) -> None:
        meta = client.put_samples(["a"], partition, batch(1, x=torch.ones(1), y=torch.ones(1)))
        assert set(client.get_data(meta).keys()) == {"x", "y"}
        assert set(client.get_data(meta, ["y"]).keys()) == {"y"}
        with pytest.raises(ValueError, match="fields"):
            client.get_data(KVBatchMeta(partition, None, ["a"]))

    @pytest.mark.parametrize("builtin", [KeyError, ValueError])
    def test_an_unknown_id_among_known_ones_is_named_by_an_error(
        self, client: DataPlaneClient, peer: DataPlaneClient, partition: str, builtin: type
    ) -> None:
        client.put_samples(["a", "b"], partition, batch(2, x=torch.ones(2)))
        with pytest.raises(builtin, match="ghost") as caught:
            peer.get_samples(["a", "ghost", "b"], partition, ["x"])
        assert isinstance(caught.value, MissingDataError)
        assert caught.value.sample_ids == ["ghost"]

    def test_a_field_missing_on_one_row_is_an_error_that_names_both(
        self, client: DataPlaneClient, peer: DataPlaneClient, partition: str
    ) -> None:
        client.put_samples(["a", "b"], partition, batch(2, x=torch.ones(2)))
        client.put_samples(["a"], partition, batch(1, y=torch.ones(1)))
        with pytest.raises(MissingDataError, match="'y'") as caught:
            peer.get_samples(["a", "b"], partition, ["x", "y"])
        assert (caught.value.sample_ids, caught.value.fields) == (["b"], ["y"])

    def test_error_lists_ten_ids_and_counts_all(
        self, client: DataPlaneClient, partition: str
    ) -> None:
        ghosts = [f"ghost{i:02}" for i in range(25)]
        with pytest.raises(MissingDataError, match="25") as caught:
            client.get_samples(ghosts, partition, ["x"])
        assert str(caught.value).count("ghost") == 10

    def test_a_partition_that_is_not_registered_is_an_error(self, client: DataPlaneClient) -> None:
        with pytest.raises(PartitionNotFoundError, match="nowhere"):
            client.get_samples(["a"], "nowhere", ["x"])
        with pytest.raises(KeyError, match="nowhere"):
            client.put_samples(["a"], "nowhere", batch(1, x=torch.ones(1)))
        with pytest.raises(ValueError, match="nowhere"):
            client.claim_meta("nowhere", "train", ["x"], 1, blocking=False)

    def test_put_with_duplicate_ids_stores_nothing(
        self, client: DataPlaneClient, peer: DataPlaneClient, partition: str
    ) -> None:
        with pytest.raises(DuplicateSampleError, match="'a'"):
            client.put_samples(["a", "b", "a"], partition, batch(3, x=torch.ones(3)))
        assert peer.claim_meta(partition, "train", ["x"], 8, blocking=False).sample_ids == []
        with pytest.raises(MissingDataError):
            peer.get_samples(["b"], partition, ["x"])

    def test_counts_that_differ_from_the_ids_are_refused(
        self, client: DataPlaneClient, partition: str
    ) -> None:
        with pytest.raises(InvalidRequestError, match="rows"):
            client.put_samples(["a"], partition, batch(2, x=torch.ones(2)))
        with pytest.raises(ValueError, match="tags"):
            client.put_samples(["a"], partition, batch(1, x=torch.ones(1)), [{}, {}])

    @pytest.mark.parametrize(
        "changed", [torch.tensor([1.5]), torch.tensor([1], dtype=torch.int32), None], ids=str
    )
    def test_a_change_of_dtype_is_refused_and_stores_nothing(
        self,
        client: DataPlaneClient,
        peer: DataPlaneClient,
        partition: str,
        changed: torch.Tensor | None,
    ) -> None:
        client.put_samples(["a"], partition, batch(1, x=torch.tensor([1])))
        value = objects("text") if changed is None else changed
        with pytest.raises(SchemaMismatchError, match="'x'"):
            peer.put_samples(["b"], partition, batch(1, x=value, y=torch.ones(1)))
        with pytest.raises(MissingDataError):
            client.get_samples(["b"], partition, ["y"])
        assert client.get_samples(["a"], partition, ["x"])["x"].tolist() == [1]

    def test_a_partition_that_was_emptied_takes_other_dtypes(
        self, client: DataPlaneClient, peer: DataPlaneClient, partition: str
    ) -> None:
        client.put_samples(["a"], partition, batch(1, x=torch.tensor([1])))
        peer.clear_samples(["a"], partition)
        client.put_samples(["a"], partition, batch(1, x=torch.tensor([0.5])))
        assert peer.get_samples(["a"], partition, ["x"])["x"].tolist() == [0.5]

    def test_an_object_array_of_another_length_is_refused(
        self, client: DataPlaneClient, partition: str
    ) -> None:
        short = np.empty(2, dtype=object)
        short[:] = ["a", "b"]
        fields = batch(3)
        fields.set_non_tensor("x", short)
        with pytest.raises(InvalidRequestError, match="2 rows; expected 3"):
            client.put_samples(["a", "b", "c"], partition, fields)

    def test_changing_returned_meta_keeps_tags_of_the_caller(
        self, client: DataPlaneClient, partition: str
    ) -> None:
        tags = [{"v": 1}]
        client.put_samples(["a"], partition, tags=tags).stamp_tags({"w": [2]})
        assert tags == [{"v": 1}]

    def test_values_outside_a_declared_vocabulary_are_refused(
        self, client: DataPlaneClient, partition: str
    ) -> None:
        client.register_partition(partition, ["role"], 8, [], enums={"role": ["user", "tool"]})
        client.put_samples(["a"], partition, batch(1, role=objects("tool")))
        with pytest.raises(InvalidRequestError, match="'narrator'"):
            client.put_samples(["b"], partition, batch(1, role=objects("narrator"), z=objects(1)))
        client.put_samples(["b"], partition, batch(1, z=torch.ones(1)))

    def test_clearing_ids_leaves_other_samples(
        self, client: DataPlaneClient, peer: DataPlaneClient, partition: str
    ) -> None:
        client.put_samples(["a", "b", "c"], partition, batch(3, x=torch.tensor([1, 2, 3])))
        peer.clear_samples(["b", "never-put"], partition)
        assert client.get_samples(["c", "a"], partition, ["x"])["x"].tolist() == [3, 1]
        with pytest.raises(MissingDataError, match="'b'"):
            client.get_samples(["b"], partition, ["x"])

    def test_cleared_id_put_again_holds_only_the_new_fields(
        self, client: DataPlaneClient, peer: DataPlaneClient, partition: str
    ) -> None:
        client.put_samples(["a"], partition, batch(1, x=torch.ones(1), y=torch.ones(1)))
        client.clear_samples(["a"], partition)
        peer.put_samples(["a"], partition, batch(1, x=torch.zeros(1)))
        assert client.get_samples(["a"], partition, ["x"])["x"].tolist() == [0.0]
        with pytest.raises(MissingDataError):
            client.get_samples(["a"], partition, ["y"])

    def test_clearing_everything_forgets_the_partition(
        self, client: DataPlaneClient, peer: DataPlaneClient, partition: str
    ) -> None:
        client.put_samples(["a"], partition, batch(1, x=torch.ones(1)))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            client.clear_samples(None, partition)
        with pytest.raises(PartitionNotFoundError):
            peer.get_samples(["a"], partition, ["x"])
        with pytest.warns(RuntimeWarning, match="nothing"):
            client.clear_samples(None, partition)

    def test_forgotten_partition_can_change_its_dtypes(
        self, client: DataPlaneClient, peer: DataPlaneClient, partition: str
    ) -> None:
        client.put_samples(["a"], partition, batch(1, x=torch.ones(1)))
        client.clear_samples(None, partition)
        client.register_partition(partition, ["x"], 1, ["train"])
        peer.put_samples(["a"], partition, batch(1, x=torch.tensor([4])))
        assert client.claim_meta(partition, "train", ["x"], 1).sample_ids == ["a"]
        assert client.get_samples(["a"], partition, ["x"])["x"].tolist() == [4]

    def test_registering_again_keeps_the_rows_and_replaces_the_tasks(
        self, client: DataPlaneClient, partition: str
    ) -> None:
        client.put_samples(["a"], partition, batch(1, x=torch.ones(1)))
        client.claim_meta(partition, "train", ["x"], 1)
        client.register_partition(partition, ["x"], 1, ["train", "new"])
        assert client.claim_meta(partition, "new", ["x"], 1).sample_ids == ["a"]
        assert client.claim_meta(partition, "train", ["x"], 1, blocking=False).sample_ids == []
        with pytest.raises(KeyError, match="logprob"):
            client.claim_meta(partition, "logprob", ["x"], 1, blocking=False)

    def test_partitions_do_not_share_ids(self, client: DataPlaneClient, partition: str) -> None:
        other = partition + "-val"
        client.register_partition(other, ["x"], 1, ["train"])
        client.put_samples(["a"], partition, batch(1, x=torch.tensor([1])))
        client.put_samples(["a"], other, batch(1, x=torch.tensor([2])))
        client.clear_samples(["a"], partition)
        assert client.get_samples(["a"], other, ["x"])["x"].tolist() == [2]

    def test_close_is_idempotent_and_a_closed_client_raises(
        self, client: DataPlaneClient, partition: str
    ) -> None:
        client.close()
        client.close()
        with pytest.raises(DataPlaneError, match="closed"):
            client.get_samples(["a"], partition, ["x"])
