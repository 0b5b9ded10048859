"""Plans that distribute rows over ranks and cut each rank's rows into micro-batches.

A plan needs row lengths only, so that the driver can plan without the tensors.
`BatchedDataDict.shard_by_batch_size` and `shard_meta_for_dp` apply the same plan. Every rank gets
the same number of micro-batches, because otherwise the ranks would deadlock in a collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from column_io.batching_args import (
    DynamicBatchingArgs,
    SequencePackingArgs,
    check_dynamic_batching_args,
    check_sequence_packing_args,
)
from column_io.packing import PACKERS, split_to_multiple
from column_io.rounding import round_up
from dataplane_core import InvalidRequestError
from dataplane_core.arguments import checked_int, checked_ints


class UnevenShardsError(InvalidRequestError, AssertionError):
    """The rows cannot be divided evenly. Also an AssertionError, as the contract requires."""


MicroBatchIndices = list[list[list[int]]]
"""Micro-batches of each global batch, as [start, stop).

Rows are counted from the rank's first row in the global batch.
"""


@dataclass(frozen=True)
class RankPlan:
    """The rows and micro-batches of one rank.

    Attributes:
        rows: indices into the batch, in the rank's order.
        micro_batch_indices: see `MicroBatchIndices`; None without packing or dynamic batching.
        micro_batch_lengths: per global batch, the tokens (packing) or the width (dynamic batching)
            of each micro-batch; None without packing or dynamic batching.
        elem_counts_per_gb: rows per global batch, with sequence packing only.
    """

    rows: list[int]
    micro_batch_indices: MicroBatchIndices | None = None
    micro_batch_lengths: list[list[int]] | None = None
    elem_counts_per_gb: list[int] | None = None


@dataclass
class _GlobalBatchPlan:
    """The rows and micro-batches of one rank in one global batch."""

    rows: list[int]
    indices: list[list[int]]
    lengths: list[int]


def plan_even_shards(
    count: int, shards: int, *, batch_size: int | None = None, allow_uneven: bool = False
) -> list[RankPlan]:
    """Cut each global batch into ``shards`` contiguous parts, one per rank.

    Args:
        count: number of rows of the batch.
        shards: number of ranks.
        batch_size: rows in a global batch; None means one global batch with all rows.
        allow_uneven: the last ranks may get fewer rows, or none.

    Raises:
        InvalidRequestError: (a ValueError) a number is below 1, or ``batch_size`` is combined with
            ``allow_uneven``.
        UnevenShardsError: (a ValueError and an AssertionError) the rows cannot be divided evenly.
    """
    shards = checked_int("sharding", "shards", shards, minimum=1)
    if allow_uneven:
        if batch_size is not None:
            raise InvalidRequestError(
                f"sharding: batch_size {batch_size} with uneven shards; expected one of the two"
            )
        width = -(-count // shards)
        return [
            RankPlan(list(range(min(rank * width, count), min((rank + 1) * width, count))))
            for rank in range(shards)
        ]
    batches = _global_batches(count, batch_size)
    _check_divisible(len(batches[0]), shards)
    width = len(batches[0]) // shards
    return [
        RankPlan([row for batch in batches for row in batch[rank * width : (rank + 1) * width]])
        for rank in range(shards)
    ]


def plan_sequence_packing(
    lengths: Sequence[int],
    shards: int,
    args: SequencePackingArgs,
    *,
    batch_size: int | None = None,
) -> list[RankPlan]:
    """Pack each global batch into micro-batches, and assign these to the ranks round-robin.

    ``lengths`` has the tokens of each row; the other arguments are as in `plan_even_shards`.
    """
    check_sequence_packing_args(args)
    lengths = checked_ints("sharding", "lengths", lengths)
    capacity = int(args["max_tokens_per_microbatch"])  # may be a numpy integer
    packer = PACKERS[args["algorithm"]]
    padded = [round_up(length, args["sequence_length_pad_multiple"]) for length in lengths]
    _check_fit(padded, capacity, "rounded up to sequence_length_pad_multiple")
    # Lengths 5 2 3 4 of one global batch, 8 tokens a bin, 2 ranks, algorithm largest_first:
    #   bins                 [0, 2] (5 + 3)   [3, 1] (4 + 2)       indices into the global batch
    #   assigned to          rank 0           rank 1
    #   rows of the rank     0, 2             3, 1
    #   micro_batch_indices  [0, 2)           [0, 2)               indices into the rank's rows
    #   micro_batch_lengths  8                6
    plans: list[list[_GlobalBatchPlan]] = []
    shards = checked_int("sharding", "shards", shards, minimum=1)
    for batch in _global_batches(len(lengths), batch_size):
        sizes = padded[batch.start : batch.stop]
        bins = split_to_multiple(packer(sizes, capacity), sizes, shards)
        if args.get("order") == "largest_first":
            bins.sort(key=lambda members: -sum(sizes[index] for index in members))
        plans.append([_plan_of_bins(bins[rank::shards], sizes, batch) for rank in range(shards)])
    return [_joined(parts, with_counts=True) for parts in zip(*plans, strict=True)]


def _plan_of_bins(bins: list[list[int]], sizes: Sequence[int], batch: range) -> _GlobalBatchPlan:
    plan = _GlobalBatchPlan([], [], [])
    for members in bins:
        start = len(plan.rows)
        plan.rows.extend(batch[index] for index in members)
        plan.indices.append([start, len(plan.rows)])
        plan.lengths.append(sum(sizes[index] for index in members))
    return plan


def plan_dynamic_batching(
    lengths: Sequence[int],
    shards: int,
    args: DynamicBatchingArgs,
    *,
    batch_size: int | None = None,
) -> list[RankPlan]:
    """Sort each global batch by length, and assign its rows to the ranks round-robin.

    Each rank's rows are then cut into micro-batches, on all ranks at the same indices. The width of
    a micro-batch is that of its longest row over all ranks, rounded up, but at most
    ``max_tokens_per_microbatch``. The arguments are as in `plan_sequence_packing`.
    """
    check_dynamic_batching_args(args)
    lengths = checked_ints("sharding", "lengths", lengths)
    capacity = int(args["max_tokens_per_microbatch"])  # may be a numpy integer
    _check_fit(lengths, capacity, "unrounded")
    # Lengths 1 2 3 4 5 6, 2 ranks, 8 tokens a micro-batch, rounded to 1:
    #   rank 0        1   3 | 5        every second row of the ascending order
    #   rank 1        2   4 | 6
    #   widths        2   4   6        longest row over the ranks at each index
    #   [0, 2) has 2 rows of width 4 = 8 tokens; 3 rows of width 6 would be 18
    plans: list[list[_GlobalBatchPlan]] = []
    shards = checked_int("sharding", "shards", shards, minimum=1)
    for batch in _global_batches(len(lengths), batch_size):
        _check_divisible(len(batch), shards)
        ascending = sorted(batch, key=lambda row: lengths[row])
        # In ascending order, ``shards`` consecutive rows go to one index of all ranks; the last of
        # them is the longest.
        widths = [
            min(round_up(lengths[row], args["sequence_length_round"]), capacity)
            for row in ascending[shards - 1 :: shards]
        ]
        indices, micro_lengths = _cut(widths, capacity)
        plans.append(
            [
                _GlobalBatchPlan(
                    ascending[rank::shards], [list(cut) for cut in indices], micro_lengths
                )
                for rank in range(shards)
            ]
        )
    return [_joined(parts, with_counts=False) for parts in zip(*plans, strict=True)]


def _cut(widths: Sequence[int], capacity: int) -> tuple[list[list[int]], list[int]]:
    """Cut rows so that rows * width <= capacity; return [start, stop) and width of each cut."""
    indices: list[list[int]] = []
    lengths: list[int] = []
    for index, width in enumerate(widths):
        if indices and (index + 1 - indices[-1][0]) * width <= capacity:
            indices[-1][1] = index + 1
            lengths[-1] = width
        else:
            indices.append([index, index + 1])
            lengths.append(width)
    return indices, lengths


def _joined(plans: Sequence[_GlobalBatchPlan], *, with_counts: bool) -> RankPlan:
    """Return the plan of one rank from its plans of all global batches."""
    return RankPlan(
        rows=[row for plan in plans for row in plan.rows],
        micro_batch_indices=[plan.indices for plan in plans],
        micro_batch_lengths=[list(plan.lengths) for plan in plans],
        elem_counts_per_gb=[len(plan.rows) for plan in plans] if with_counts else None,
    )


def _global_batches(count: int, batch_size: int | None) -> list[range]:
    count = checked_int("sharding", "rows", count, minimum=1)
    size = count if batch_size is None else batch_size
    size = checked_int("sharding", "batch_size", size, minimum=1)
    if count % size:
        raise UnevenShardsError(
            f"sharding: {count} rows in global batches of {size}; expected a multiple of {size}"
        )
    return [range(start, start + size) for start in range(0, count, size)]


def _check_divisible(rows: int, shards: int) -> None:
    if rows % shards:
        raise UnevenShardsError(
            f"sharding: {rows} rows over {shards} ranks; expected a multiple of {shards}"
        )


def _check_fit(lengths: Sequence[int], capacity: int, how: str) -> None:
    longest = max(range(len(lengths)), key=lambda row: lengths[row], default=None)
    if longest is not None and lengths[longest] > capacity:
        raise InvalidRequestError(
            f"sharding: row {longest} has {lengths[longest]} tokens ({how}); expected at most "
            f"max_tokens_per_microbatch = {capacity}"
        )
