"""Shards of a batch and their micro-batches, from the plan to the last row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from column_io import (
    BatchedDataDict,
    kv_first_write,
    read_columns,
    round_up,
    shard_meta_for_dp,
)
from dataplane_core import DataPlaneClient, InMemoryDataPlaneClient, KVBatchMeta

CAPACITY = 16
PACKING: Any = {
    "max_tokens_per_microbatch": CAPACITY,
    "algorithm": "modified_first_fit_decreasing",
    "sequence_length_pad_multiple": 2,
    "input_key": "input_ids",
    "input_lengths_key": "input_lengths",
}
DYNAMIC: Any = {
    "max_tokens_per_microbatch": CAPACITY,
    "sequence_length_round": 2,
    "input_key": "input_ids",
    "input_lengths_key": "input_lengths",
}
KINDS = [
    pytest.param({"sequence_packing_args": PACKING}, id="packing"),
    pytest.param({"dynamic_batching_args": DYNAMIC}, id="dynamic"),
]


def batch_of(lengths: list[int]) -> BatchedDataDict[Any]:
    """Row i holds i + 1 in each of its tokens."""
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)
    for row, length in enumerate(lengths):
        ids[row, :length] = row + 1
    return BatchedDataDict(
        input_ids=ids,
        input_lengths=torch.tensor(lengths),
        sample_mask=torch.ones(len(lengths)),
        row=torch.arange(len(lengths)),
    )


@st.composite
def sharded(draw: st.DrawFn) -> tuple[list[int], int, int]:
    """Lengths, ranks, and rows in a global batch."""
    shards = draw(st.integers(1, 3))
    batch_size = shards * draw(st.integers(1, 4))
    count = batch_size * draw(st.integers(1, 3))
    lengths = draw(st.lists(st.integers(1, CAPACITY), min_size=count, max_size=count))
    return lengths, shards, batch_size


def test_even_shards_take_their_part_of_each_global_batch() -> None:
    shards = batch_of([1] * 8).shard_by_batch_size(2, batch_size=4)
    assert isinstance(shards, list)
    assert [shard["row"].tolist() for shard in shards] == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_uneven_shards_are_allowed_on_request() -> None:
    with pytest.raises(AssertionError, match="5 rows over 2 ranks"):
        batch_of([1] * 5).shard_by_batch_size(2)
    shards = batch_of([1] * 5).shard_by_batch_size(2, allow_uneven_shards=True)
    assert isinstance(shards, list)
    assert [shard["row"].tolist() for shard in shards] == [[0, 1, 2], [3, 4]]
    with pytest.raises(ValueError, match="batch_size 5 with uneven shards"):
        batch_of([1] * 5).shard_by_batch_size(2, batch_size=5, allow_uneven_shards=True)


@pytest.mark.parametrize(
    "arguments",
    [
        {"sequence_packing_args": PACKING, "dynamic_batching_args": DYNAMIC},
        {"sequence_packing_args": PACKING, "allow_uneven_shards": True},
        {"dynamic_batching_args": DYNAMIC, "allow_uneven_shards": True},
    ],
)
def test_arguments_that_exclude_each_other_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="at most one"):
        batch_of([1, 2]).shard_by_batch_size(2, **arguments)


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_lengths_column_is_named(kind: dict[str, Any]) -> None:
    batch = batch_of([1, 2])
    del batch["input_lengths"]
    with pytest.raises(KeyError, match="'input_lengths'"):
        batch.shard_by_batch_size(2, **kind)


@pytest.mark.parametrize("kind", KINDS)
@given(plan=sharded())
def test_data_and_meta_are_sharded_by_the_same_plan(
    kind: dict[str, Any], plan: tuple[list[int], int, int]
) -> None:
    lengths, shards, batch_size = plan
    batch = batch_of(lengths)
    ids = [str(row) for row in range(len(lengths))]
    data_shards, order = batch.shard_by_batch_size(shards, batch_size=batch_size, **kind)
    assert isinstance(data_shards, list)
    with InMemoryDataPlaneClient() as client:
        client.register_partition("train", [], len(ids), ["train"])
        meta = kv_first_write(batch, sample_ids=ids, dp_client=client, partition_id="train")
    metas, inverse = shard_meta_for_dp(meta, dp_world=shards, batch_size=batch_size, **kind)
    for data, shard in zip(data_shards, metas, strict=True):
        assert [str(row) for row in data["row"].tolist()] == shard.sample_ids
        assert data.micro_batch_indices == shard.extra_info["micro_batch_indices"]
        assert data.micro_batch_lengths == shard.extra_info["micro_batch_lengths"]
        assert data.elem_counts_per_gb == shard.extra_info.get("elem_counts_per_gb")
    joined = BatchedDataDict.from_batches(data_shards)
    if inverse is not None:
        assert joined.select_indices(inverse)["row"].tolist() == batch["row"].tolist()
    joined.reorder_data(order)  # type: ignore[arg-type]
    assert joined["row"].tolist() == batch["row"].tolist()


@pytest.mark.parametrize("kind", KINDS)
@given(plan=sharded())
def test_each_row_is_consumed_once_with_all_its_tokens(
    kind: dict[str, Any], plan: tuple[list[int], int, int]
) -> None:
    lengths, shards, batch_size = plan
    batch = batch_of(lengths)
    ids = [str(row) for row in range(len(lengths))]
    seen: list[int] = []
    with InMemoryDataPlaneClient() as client:
        client.register_partition("train", [], len(ids), ["train"])
        meta = kv_first_write(batch, sample_ids=ids, dp_client=client, partition_id="train")
        meta.extra_info["global_forward_pad_seqlen"] = round_up(max(lengths), 2)
        metas, _ = shard_meta_for_dp(meta, dp_world=shards, batch_size=batch_size, **kind)
        for shard in metas:
            data = read_columns(client, shard, ["input_ids", "input_lengths", "row"])
            for global_batch in range(len(lengths) // batch_size):
                part = data.get_batch(global_batch)
                if "dynamic_batching_args" in kind:
                    micro_batches = list(part.make_microbatch_iterator_with_dynamic_shapes())
                    assert len(micro_batches) == part.get_microbatch_iterator_dynamic_shapes_len()
                else:
                    micro_batches = list(part.make_microbatch_iterator_for_packable_sequences())
                    count, largest = part.get_microbatch_iterator_for_packable_sequences_len()
                    assert len(micro_batches) == count
                    assert largest <= CAPACITY
                for micro_batch in micro_batches:
                    rows = micro_batch["row"].tolist()
                    seen += rows
                    if "dynamic_batching_args" in kind:
                        assert micro_batch["input_ids"].numel() <= CAPACITY
                    for row, tokens in zip(rows, micro_batch["input_ids"], strict=True):
                        assert tokens[: lengths[row]].tolist() == [row + 1] * lengths[row]
                        assert not tokens[lengths[row] :].any()
                        assert row // batch_size == global_batch
    assert sorted(seen) == list(range(len(lengths)))


def test_a_dynamic_micro_batch_is_cut_to_its_width() -> None:
    (shard,), _ = batch_of([1, 3, 9]).shard_by_batch_size(1, dynamic_batching_args=DYNAMIC)
    assert isinstance(shard, BatchedDataDict)
    shapes = [
        tuple(micro_batch["input_ids"].shape)
        for micro_batch in shard.make_microbatch_iterator_with_dynamic_shapes()
    ]
    assert shapes == [(2, 4), (1, 9)]  # planned 10 wide, but there are only 9 columns


def test_cutting_a_micro_batch_spares_features_of_another_width() -> None:
    batch = batch_of([1, 1, 8])
    batch["pixels"] = torch.ones(3, 5)
    (shard,), _ = batch.shard_by_batch_size(1, dynamic_batching_args=DYNAMIC)
    assert isinstance(shard, BatchedDataDict)
    first = next(shard.make_microbatch_iterator_with_dynamic_shapes())
    assert first["input_ids"].shape == (2, 2)
    assert first["pixels"].shape == (2, 5)


def test_without_input_ids_every_tensor_of_the_dim_is_cut() -> None:
    batch: BatchedDataDict[Any] = BatchedDataDict(
        tokens=torch.ones(2, 8), lengths=torch.tensor([1, 8])
    )
    args: Any = {**DYNAMIC, "input_lengths_key": "lengths"}
    (shard,), _ = batch.shard_by_batch_size(1, dynamic_batching_args=args)
    assert isinstance(shard, BatchedDataDict)
    shard["more"] = torch.ones(2, 4)
    shard.micro_batch_lengths = [[2]]
    first = next(shard.make_microbatch_iterator_with_dynamic_shapes())
    assert first["tokens"].shape == first["more"].shape == (2, 2)


def test_plain_micro_batches_have_the_requested_rows() -> None:
    micro_batches = batch_of([1] * 6).make_microbatch_iterator(2)
    rows = [micro_batch["row"].tolist() for micro_batch in micro_batches]
    assert rows == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("size", [0, 4])
def test_plain_micro_batches_refuse_a_remainder_at_once(size: int) -> None:
    with pytest.raises(AssertionError, match="6 rows"):
        batch_of([1] * 6).make_microbatch_iterator(size)


def test_get_batch_without_a_plan_takes_rows_by_number() -> None:
    batch = batch_of([1] * 6)
    assert batch.get_batch(1, batch_size=2)["row"].tolist() == [2, 3]
    with pytest.raises(IndexError, match="rows 6 to 8"):
        batch.get_batch(3, batch_size=2)
    with pytest.raises(ValueError, match="no batch_size and no planned"):
        batch.get_batch(0)


def test_get_batch_keeps_the_plan_of_its_rows() -> None:
    (shard,), _ = batch_of([9, 9, 1, 1]).shard_by_batch_size(
        1, batch_size=2, sequence_packing_args=PACKING
    )
    assert isinstance(shard, BatchedDataDict)
    second = shard.get_batch(1)
    assert second["row"].tolist() == [2, 3]
    assert second.micro_batch_indices == [[[0, 2]]]
    assert second.micro_batch_lengths == [[4]]
    assert second.elem_counts_per_gb == [2]
    with pytest.raises(IndexError, match="2 are planned"):
        shard.get_batch(2)


@pytest.mark.parametrize(
    "iterator",
    [
        "make_microbatch_iterator_with_dynamic_shapes",
        "make_microbatch_iterator_for_packable_sequences",
    ],
)
def test_micro_batches_need_the_plan_of_one_global_batch(iterator: str) -> None:
    batch = batch_of([1, 1])
    with pytest.raises(ValueError, match="no micro-batches are planned"):
        getattr(batch, iterator)()
    batch.micro_batch_indices, batch.micro_batch_lengths = [[[0, 1]]] * 2, [[1]] * 2
    with pytest.raises(ValueError, match="get_batch"):
        getattr(batch, iterator)()


def test_operations_that_move_rows_drop_the_plan() -> None:
    (shard,), _ = batch_of([1, 2]).shard_by_batch_size(1, sequence_packing_args=PACKING)
    assert isinstance(shard, BatchedDataDict)
    assert shard.slice(0, 1).micro_batch_indices is None
    assert shard.select_indices([1, 0]).micro_batch_indices is None
    shard.reorder_data([1, 0])
    assert shard.micro_batch_indices is None


def test_a_subset_of_a_planned_shard_is_read_without_the_plan(client: DataPlaneClient) -> None:
    meta = kv_first_write(
        batch_of([1, 2]), sample_ids=["a", "b"], dp_client=client, partition_id="train"
    )
    (shard,), _ = shard_meta_for_dp(meta, dp_world=1, sequence_packing_args=PACKING)
    assert read_columns(client, shard, ["row"]).micro_batch_indices == [[[0, 2]]]
    assert read_columns(client, shard.subset([0]), ["row"]).micro_batch_indices is None


@pytest.mark.parametrize(
    "move",
    [
        lambda shard: shard.subset([1, 0, 2]),
        lambda shard: shard.subset([0, 1, 1]),
        lambda shard: shard.slice(0, 2),
        lambda shard: shard.drop([1]),
        lambda shard: shard.slice(1, 3).concat(shard.slice(0, 1)),
    ],
    ids=["moved", "repeated", "cut", "dropped", "joined"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_stays_with_the_ids_it_was_made_for(
    client: DataPlaneClient, kind: dict[str, Any], move: Callable[[KVBatchMeta], KVBatchMeta]
) -> None:
    batch = batch_of([6, 3, 1])
    meta = kv_first_write(batch, sample_ids=["a", "b", "c"], dp_client=client, partition_id="train")
    (shard,), _ = shard_meta_for_dp(meta, dp_world=1, **kind)
    kept = read_columns(client, shard.with_fields(["more"]).subset([0, 1, 2]), ["row"])
    assert kept.micro_batch_indices == shard.extra_info["micro_batch_indices"]
    moved = read_columns(client, move(shard), ["row"])
    assert moved.micro_batch_indices is None
    assert moved.elem_counts_per_gb is None
    with pytest.raises(ValueError, match="plan for its rows in this order"):
        moved.make_microbatch_iterator_for_packable_sequences()


def test_plan_without_digest_is_used_if_row_counts_match(
    client: DataPlaneClient,
) -> None:
    batch = batch_of([1, 1])
    meta = kv_first_write(batch, sample_ids=["a", "b"], dp_client=client, partition_id="train")
    meta.extra_info |= {"micro_batch_indices": [[[0, 2]]], "micro_batch_lengths": [[2]]}
    assert read_columns(client, meta, ["row"]).micro_batch_indices == [[[0, 2]]]
    assert read_columns(client, meta.subset([0]), ["row"]).micro_batch_indices is None


def test_a_plan_for_another_number_of_rows_is_refused() -> None:
    (shard,), _ = batch_of([1, 2]).shard_by_batch_size(1, sequence_packing_args=PACKING)
    assert isinstance(shard, BatchedDataDict)
    longer = BatchedDataDict.from_batches([shard, shard])
    shard.data = longer.data
    for use in (
        lambda: shard.get_batch(0),
        shard.make_microbatch_iterator_for_packable_sequences,
    ):
        with pytest.raises(ValueError, match="planned for 2 rows and the batch has 4"):
            use()


def test_features_as_wide_as_the_tokens_are_not_cut(client: DataPlaneClient) -> None:
    batch = batch_of([1, 1, 8])
    batch["pixels"] = torch.ones(3, 8)
    meta = kv_first_write(batch, sample_ids=["a", "b", "c"], dp_client=client, partition_id="train")
    client.put_columns(
        meta.sample_ids, "train", {"values": torch.ones(3, 8)}, lengths=[1, 1, 8], ragged=["values"]
    )
    (shard,), _ = shard_meta_for_dp(meta, dp_world=1, dynamic_batching_args=DYNAMIC)
    read = read_columns(client, shard, ["input_ids", "pixels", "values"])
    first = next(read.get_batch(0).make_microbatch_iterator_with_dynamic_shapes())
    assert first["input_ids"].shape == first["values"].shape == (2, 2)
    assert first["pixels"].shape == (2, 8)
