"""`shard_meta_for_dp` assigns every row to one rank, from lengths alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from column_io import round_up, shard_meta_for_dp
from dataplane_core import InvalidRequestError, KVBatchMeta

CAPACITY = 32


def meta_of(lengths: list[int], **extra_info: Any) -> KVBatchMeta:
    return KVBatchMeta(
        partition_id="train",
        task_name="train",
        sample_ids=[f"s{row}" for row in range(len(lengths))],
        fields=["input_ids"],
        sequence_lengths=lengths,
        extra_info=extra_info,
        tags=[{"row": row} for row in range(len(lengths))],
    )


def packing(**changes: Any) -> Any:
    return {
        "max_tokens_per_microbatch": CAPACITY,
        "algorithm": "modified_first_fit_decreasing",
        "sequence_length_pad_multiple": 4,
        **changes,
    }


def dynamic(**changes: Any) -> Any:
    return {
        "max_tokens_per_microbatch": CAPACITY,
        "sequence_length_round": 4,
        **changes,
    }


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], int, int]:
    """Lengths, ranks, and rows in a global batch."""
    dp_world = draw(st.integers(1, 4))
    batch_size = dp_world * draw(st.integers(1, 5))
    count = batch_size * draw(st.integers(1, 3))
    lengths = draw(st.lists(st.integers(0, CAPACITY), min_size=count, max_size=count))
    return lengths, dp_world, batch_size


def check_rows(meta: KVBatchMeta, metas: list[KVBatchMeta], inverse: list[int] | None) -> None:
    """Each id once, lengths follow, and ``inverse`` restores the order."""
    lengths = dict(zip(meta.sample_ids, meta.sequence_lengths or [], strict=True))
    joined = [sample_id for shard in metas for sample_id in shard.sample_ids]
    assert sorted(joined) == sorted(meta.sample_ids)
    for shard in metas:
        assert shard.sequence_lengths == [lengths[sample_id] for sample_id in shard.sample_ids]
        assert (shard.partition_id, shard.task_name) == (meta.partition_id, meta.task_name)
        assert shard.fields == meta.fields
        assert shard.tags is None
    if inverse is None:
        assert joined == meta.sample_ids
    else:
        assert joined != meta.sample_ids
        assert [joined[place] for place in inverse] == meta.sample_ids


def check_plan(
    metas: list[KVBatchMeta], original: list[str], batch_size: int
) -> list[list[tuple[list[int], int]]]:
    """Return the micro-batches of each rank as (lengths of the rows, planned length)."""
    counts = {tuple(map(len, shard.extra_info["micro_batch_indices"])) for shard in metas}
    assert len(counts) == 1, "ranks differ in their number of micro-batches"
    ranks = []
    for shard in metas:
        micro_batches, start = [], 0
        for chunk, (indices, lengths) in enumerate(
            zip(
                shard.extra_info["micro_batch_indices"],
                shard.extra_info["micro_batch_lengths"],
                strict=True,
            )
        ):
            allowed = set(original[chunk * batch_size : (chunk + 1) * batch_size])
            place = 0
            for (first, stop), length in zip(indices, lengths, strict=True):
                assert first == place < stop
                rows = slice(start + first, start + stop)
                assert set(shard.sample_ids[rows]) <= allowed
                micro_batches.append(((shard.sequence_lengths or [])[rows], length))
                place = stop
            start += place
        assert start == shard.size
        ranks.append(micro_batches)
    return ranks


@given(batch=batches())
def test_plain_shards_hold_each_row_once(batch: tuple[list[int], int, int]) -> None:
    lengths, dp_world, batch_size = batch
    meta = meta_of(lengths)
    metas, inverse = shard_meta_for_dp(meta, dp_world=dp_world, batch_size=batch_size)
    check_rows(meta, metas, inverse)
    assert {shard.size for shard in metas} == {len(lengths) // dp_world}
    assert not any("micro_batch_indices" in shard.extra_info for shard in metas)


def test_plain_shards_are_contiguous_and_in_order() -> None:
    metas, inverse = shard_meta_for_dp(meta_of([1, 2, 3, 4]), dp_world=2)
    assert [shard.sample_ids for shard in metas] == [["s0", "s1"], ["s2", "s3"]]
    assert inverse is None


def test_plain_shards_of_global_batches_have_an_inverse() -> None:
    metas, inverse = shard_meta_for_dp(meta_of([1, 2, 3, 4]), dp_world=2, batch_size=2)
    assert [shard.sample_ids for shard in metas] == [["s0", "s2"], ["s1", "s3"]]
    assert inverse == [0, 2, 1, 3]


@given(
    batch=batches(),
    algorithm=st.sampled_from(
        [
            "concatenative",
            "order",
            "first_fit_decreasing",
            "largest_first",
            "modified_first_fit_decreasing",
        ]
    ),
    multiple=st.sampled_from([1, 4, 16]),
    order=st.sampled_from(["packer", "largest_first"]),
)
def test_packed_micro_batches_stay_within_their_tokens(
    batch: tuple[list[int], int, int], algorithm: str, multiple: int, order: str
) -> None:
    lengths, dp_world, batch_size = batch
    meta = meta_of(lengths)
    args = packing(algorithm=algorithm, sequence_length_pad_multiple=multiple, order=order)
    metas, inverse = shard_meta_for_dp(
        meta, dp_world=dp_world, batch_size=batch_size, sequence_packing_args=args
    )
    check_rows(meta, metas, inverse)
    for micro_batches in check_plan(metas, meta.sample_ids, batch_size):
        for rows, tokens in micro_batches:
            assert tokens == sum(round_up(length, multiple) for length in rows) <= CAPACITY
    for shard in metas:
        chunks = [cuts[-1][1] for cuts in shard.extra_info["micro_batch_indices"]]
        assert shard.extra_info["elem_counts_per_gb"] == chunks


@given(batch=batches(), rounding=st.sampled_from([1, 4, 5, 64]))
def test_dynamic_micro_batches_stay_within_their_tokens(
    batch: tuple[list[int], int, int], rounding: int
) -> None:
    lengths, dp_world, batch_size = batch
    meta = meta_of(lengths)
    metas, inverse = shard_meta_for_dp(
        meta,
        dp_world=dp_world,
        batch_size=batch_size,
        dynamic_batching_args=dynamic(sequence_length_round=rounding),
    )
    check_rows(meta, metas, inverse)
    assert all("elem_counts_per_gb" not in shard.extra_info for shard in metas)
    for same_place in zip(*check_plan(metas, meta.sample_ids, batch_size), strict=True):
        (width,) = {width for _, width in same_place}
        (rows,) = {len(rows) for rows, _ in same_place}
        longest = max(length for rows, _ in same_place for length in rows)
        assert width == min(round_up(longest, rounding), CAPACITY)
        assert rows * width <= CAPACITY


def test_dynamic_width_is_capped_only_by_max_tokens() -> None:
    """Regression test: upstream caps the planned width at the width of a placeholder tensor."""
    metas, _ = shard_meta_for_dp(
        meta_of([3, 3, 30, 30]), dp_world=2, dynamic_batching_args=dynamic(sequence_length_round=16)
    )
    assert metas[0].extra_info["micro_batch_lengths"] == [[16, 32]]
    metas, _ = shard_meta_for_dp(
        meta_of([3, 30]), dp_world=2, dynamic_batching_args=dynamic(sequence_length_round=48)
    )
    assert metas[0].extra_info["micro_batch_lengths"] == [[CAPACITY]]


def test_dynamic_batching_assigns_similar_lengths_to_all_ranks() -> None:
    metas, inverse = shard_meta_for_dp(
        meta_of([8, 1, 7, 2]), dp_world=2, dynamic_batching_args=dynamic()
    )
    assert [shard.sequence_lengths for shard in metas] == [[1, 7], [2, 8]]
    assert inverse == [3, 0, 1, 2]
    assert metas[0].extra_info["micro_batch_indices"] == [[[0, 2]]]
    assert metas[0].extra_info["micro_batch_lengths"] == [[8]]


def test_packed_bins_are_assigned_round_robin() -> None:
    metas, _ = shard_meta_for_dp(
        meta_of([30, 20, 31, 10, 29, 28]),
        dp_world=2,
        sequence_packing_args=packing(algorithm="order", sequence_length_pad_multiple=1),
    )
    assert [shard.sequence_lengths for shard in metas] == [[30, 31, 29], [20, 10, 28]]


def test_order_largest_first_runs_the_largest_micro_batch_first() -> None:
    metas, _ = shard_meta_for_dp(
        meta_of([10, 30, 20, 31]),
        dp_world=1,
        sequence_packing_args=packing(
            algorithm="order", sequence_length_pad_multiple=1, order="largest_first"
        ),
    )
    assert metas[0].extra_info["micro_batch_lengths"] == [[31, 30, 20, 10]]


def test_extra_info_is_kept_and_not_shared() -> None:
    meta = meta_of([1, 2], global_forward_pad_seqlen=8)
    metas, _ = shard_meta_for_dp(meta, dp_world=2, sequence_packing_args=packing())
    assert [shard.extra_info["global_forward_pad_seqlen"] for shard in metas] == [8, 8]
    assert meta.extra_info == {"global_forward_pad_seqlen": 8}


def test_the_plan_of_an_earlier_sharding_is_not_inherited() -> None:
    metas, _ = shard_meta_for_dp(meta_of([1, 2]), dp_world=1, sequence_packing_args=packing())
    again, _ = shard_meta_for_dp(metas[0], dp_world=1, dynamic_batching_args=dynamic())
    assert "elem_counts_per_gb" not in again[0].extra_info
    plain, _ = shard_meta_for_dp(metas[0], dp_world=1)
    assert plain[0].extra_info == {}


def test_repeated_ids_are_assigned_by_row() -> None:
    meta = KVBatchMeta("train", None, ["a", "a"], sequence_lengths=[1, 2])
    metas, _ = shard_meta_for_dp(meta, dp_world=2)
    assert [(shard.sample_ids, shard.sequence_lengths) for shard in metas] == [
        (["a"], [1]),
        (["a"], [2]),
    ]


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        (KVBatchMeta("train", None, [], sequence_lengths=[]), "no sample_ids"),
        (KVBatchMeta("train", None, ["a"]), "no sequence_lengths for 1"),
        (KVBatchMeta("train", None, ["a"], sequence_lengths=[1, 2]), "2 sequence_lengths for 1"),
    ],
)
def test_a_meta_without_ids_or_lengths_is_refused(meta: KVBatchMeta, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shard_meta_for_dp(meta, dp_world=1)


def test_both_kinds_of_micro_batches_are_refused() -> None:
    with pytest.raises(ValueError, match="at most one"):
        shard_meta_for_dp(
            meta_of([1]),
            dp_world=1,
            sequence_packing_args=packing(),
            dynamic_batching_args=dynamic(),
        )


@pytest.mark.parametrize("kind", [{}, {"dynamic_batching_args": dynamic()}])
@pytest.mark.parametrize("error", [AssertionError, ValueError])
def test_rows_that_do_not_divide_are_refused(kind: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match="3 rows over 2 ranks"):
        shard_meta_for_dp(meta_of([1, 2, 3]), dp_world=2, **kind)
    with pytest.raises(error, match="global batches of 2"):
        shard_meta_for_dp(meta_of([1, 2, 3]), dp_world=2, batch_size=2, **kind)


def test_packing_needs_divisible_micro_batches_not_rows() -> None:
    meta = meta_of([30, 1, 1])
    metas, inverse = shard_meta_for_dp(meta, dp_world=2, sequence_packing_args=packing())
    check_rows(meta, metas, inverse)
    assert [shard.extra_info["elem_counts_per_gb"] for shard in metas] == [[1], [2]]


def test_too_few_rows_for_all_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 4 sequences"):
        shard_meta_for_dp(meta_of([30, 30, 30]), dp_world=2, sequence_packing_args=packing())


@pytest.mark.parametrize(
    "kind",
    [
        {"sequence_packing_args": packing(sequence_length_pad_multiple=64)},
        {"dynamic_batching_args": dynamic(max_tokens_per_microbatch=8)},
    ],
)
def test_a_row_that_exceeds_a_micro_batch_is_refused(kind: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="row 1 has"):
        shard_meta_for_dp(meta_of([0, 9]), dp_world=1, **kind)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            packing(algorithm="first_fit_shuffle"),
            "'first_fit_shuffle' of type str; expected",
        ),
        (
            packing(order="random"),
            "of type str; expected one of 'packer', 'largest_first'",
        ),
        (packing(max_tokens_per_microbatch=0), "max_tokens_per_microbatch is 0"),
        (packing(max_tokens_per_microbatch="16"), "max_tokens_per_microbatch is '16' of type str"),
        (packing(sequence_length_pad_multiple=0), "sequence_length_pad_multiple is 0"),
        (packing(sequence_length_pad_multiple=-4), "sequence_length_pad_multiple is -4"),
        (packing(sequence_length_pad_multiple=2.5), "sequence_length_pad_multiple is 2.5"),
        (packing(algorithm=["order"]), "algorithm .* of type list"),
        ("order", "sequence_packing_args is 'order' of type str; expected a dict"),
        (packing(max_tokens=8), "unknown 'max_tokens'"),
        ({"algorithm": "order"}, "missing 'max_tokens_per_microbatch'"),
    ],
)
def test_wrong_packing_arguments_are_named(args: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shard_meta_for_dp(meta_of([1]), dp_world=1, sequence_packing_args=args)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (dynamic(sequence_round=8), "unknown 'sequence_round'"),
        ({"max_tokens_per_microbatch": 8}, "missing 'sequence_length_round'"),
    ],
)
def test_wrong_dynamic_arguments_are_named(args: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shard_meta_for_dp(meta_of([1]), dp_world=1, dynamic_batching_args=args)


@pytest.mark.parametrize("numbers", [{"dp_world": 0}, {"dp_world": 1, "batch_size": 0}])
def test_numbers_below_one_are_refused(numbers: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        shard_meta_for_dp(meta_of([1]), **numbers)


def test_shards_have_plain_ints_for_any_type_of_lengths() -> None:
    lengths: Any = torch.tensor([3, 1, 2, 4])
    meta = KVBatchMeta("p", None, list("abcd"), sequence_lengths=lengths)
    shards, _ = shard_meta_for_dp(meta, dp_world=2)
    lengths = [shard.sequence_lengths for shard in shards]
    assert lengths == [[3, 1], [2, 4]]
    assert {type(length) for own in lengths for length in own or ()} == {int}


@pytest.mark.parametrize(
    ("value", "multiple"), [(-9, 4), (5.5, 4), (True, 4), ("5", 4), (5, 2.0), (5, True), (5, None)]
)
def test_round_up_refuses_invalid_numbers(value: Any, multiple: Any) -> None:
    with pytest.raises(InvalidRequestError, match="round_up"):
        round_up(value, multiple)
