"""Which row goes to which rank, and how each rank cuts its rows into micro-batches.

Planned from row lengths alone, so that the driver can plan a batch whose tensors it never holds.
`BatchedDataDict.shard_by_batch_size` and `shard_meta_for_dp` carry out the same plan. Every rank
gets the same number of micro-batches: ranks that run a different number would wait for each other
in a collective forever.
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
    """The rows cannot be divided as asked. Also an AssertionError, which the contract names."""


MicroBatchIndices = list[list[list[int]]]
"""Per chunk of the global batch a list of [start, stop), relative to the chunk's first row."""


@dataclass(frozen=True)
class RankPlan:
    """What one rank gets.

    Attributes:
        rows: places in the whole batch, in the order in which the rank holds them.
        micro_batch_indices: see `MicroBatchIndices`; None without packing or dynamic batching.
        micro_batch_lengths: per chunk, the tokens (packing) or the width (dynamic batching) of
            each micro-batch; None likewise.
        elem_counts_per_gb: rows per chunk, with sequence packing only.
    """

    rows: list[int]
    micro_batch_indices: MicroBatchIndices | None = None
    micro_batch_lengths: list[list[int]] | None = None
    elem_counts_per_gb: list[int] | None = None


@dataclass
class _ChunkShare:
    rows: list[int]
    indices: list[list[int]]
    lengths: list[int]


def plan_even_shards(
    count: int, shards: int, *, batch_size: int | None = None, allow_uneven: bool = False
) -> list[RankPlan]:
    """Cut each chunk of ``batch_size`` rows into ``shards`` contiguous parts, one per rank.

    Args:
        count: rows in the whole batch.
        shards: number of ranks.
        batch_size: rows in a chunk (a global batch); None is one chunk.
        allow_uneven: the last ranks may get fewer rows, or none.

    Raises:
        InvalidRequestError: (a ValueError) if a number is below 1, or ``batch_size`` is combined
            with ``allow_uneven``.
        UnevenShardsError: (a ValueError and an AssertionError) if the rows do not divide.
    """
    if allow_uneven:
        if batch_size is not None:
            raise InvalidRequestError(
                f"sharding: batch_size {batch_size} with uneven shards; expected one of the two"
            )
        _check_at_least_one(shards=shards)
        width = -(-count // shards)
        return [
            RankPlan(list(range(min(rank * width, count), min((rank + 1) * width, count))))
            for rank in range(shards)
        ]
    chunks = _chunks(count, shards, batch_size)
    _check_divisible(len(chunks[0]), shards)
    width = len(chunks[0]) // shards
    return [
        RankPlan([row for chunk in chunks for row in chunk[rank * width : (rank + 1) * width]])
        for rank in range(shards)
    ]


def plan_sequence_packing(
    lengths: Sequence[int],
    shards: int,
    args: SequencePackingArgs,
    *,
    batch_size: int | None = None,
) -> list[RankPlan]:
    """Pack each chunk into micro-batches and deal those to the ranks in turn.

    Args:
        lengths: tokens per row.
        shards: number of ranks.
        args: see `SequencePackingArgs`.
        batch_size: rows in a chunk (a global batch); None is one chunk.

    Raises:
        InvalidRequestError: (a ValueError) on an unknown algorithm, order or key, on a row that
            exceeds a micro-batch, or if a chunk has too few rows to give each rank as many
            micro-batches.
        UnevenShardsError: if the chunks do not divide the rows.
    """
    check_sequence_packing_args(args)
    lengths = checked_ints("sharding", "lengths", lengths)
    capacity = args["max_tokens_per_microbatch"]
    packer = PACKERS[args["algorithm"]]
    padded = [round_up(length, args["sequence_length_pad_multiple"]) for length in lengths]
    _check_fit(padded, capacity, "rounded up to sequence_length_pad_multiple")
    shares: list[list[_ChunkShare]] = []
    for chunk in _chunks(len(lengths), shards, batch_size):
        sizes = padded[chunk.start : chunk.stop]
        bins = split_to_multiple(packer(sizes, capacity), sizes, shards)
        if args.get("order") == "largest_first":
            bins.sort(key=lambda members: -sum(sizes[place] for place in members))
        shares.append([_share_of_bins(bins[rank::shards], sizes, chunk) for rank in range(shards)])
    return [
        _joined([chunk_shares[rank] for chunk_shares in shares], with_counts=True)
        for rank in range(shards)
    ]


def _share_of_bins(bins: list[list[int]], sizes: Sequence[int], chunk: range) -> _ChunkShare:
    share = _ChunkShare([], [], [])
    for members in bins:
        start = len(share.rows)
        share.rows.extend(chunk[place] for place in members)
        share.indices.append([start, len(share.rows)])
        share.lengths.append(sum(sizes[place] for place in members))
    return share


def plan_dynamic_batching(
    lengths: Sequence[int],
    shards: int,
    args: DynamicBatchingArgs,
    *,
    batch_size: int | None = None,
) -> list[RankPlan]:
    """Sort each chunk by length, deal the rows to the ranks in turn, and cut at common places.

    A micro-batch is as wide as its longest row over all ranks, rounded up, but no wider than
    ``max_tokens_per_microbatch``; all ranks cut at the same places.

    Args:
        lengths: tokens per row.
        shards: number of ranks.
        args: see `DynamicBatchingArgs`.
        batch_size: rows in a chunk (a global batch); None is one chunk.

    Raises:
        InvalidRequestError: (a ValueError) on an unknown key or a row that exceeds a micro-batch.
        UnevenShardsError: (a ValueError and an AssertionError) if the rows do not divide.
    """
    check_dynamic_batching_args(args)
    lengths = checked_ints("sharding", "lengths", lengths)
    capacity = args["max_tokens_per_microbatch"]
    _check_fit(lengths, capacity, "unrounded")
    shares: list[list[_ChunkShare]] = []
    for chunk in _chunks(len(lengths), shards, batch_size):
        _check_divisible(len(chunk), shards)
        ascending = sorted(chunk, key=lambda row: lengths[row])
        # Neighbours of equal place on all ranks: the last is the longest of them.
        widths = [
            min(round_up(lengths[row], args["sequence_length_round"]), capacity)
            for row in ascending[shards - 1 :: shards]
        ]
        indices, micro_lengths = _cut(widths, capacity)
        shares.append(
            [
                _ChunkShare(ascending[rank::shards], [list(cut) for cut in indices], micro_lengths)
                for rank in range(shards)
            ]
        )
    return [
        _joined([chunk_shares[rank] for chunk_shares in shares], with_counts=False)
        for rank in range(shards)
    ]


def _cut(widths: Sequence[int], capacity: int) -> tuple[list[list[int]], list[int]]:
    """Consecutive places, as many as fit: rows times the width of the widest <= capacity."""
    indices: list[list[int]] = []
    lengths: list[int] = []
    for place, width in enumerate(widths):
        if indices and (place + 1 - indices[-1][0]) * width <= capacity:
            indices[-1][1] = place + 1
            lengths[-1] = width
        else:
            indices.append([place, place + 1])
            lengths.append(width)
    return indices, lengths


def _joined(shares: list[_ChunkShare], *, with_counts: bool) -> RankPlan:
    return RankPlan(
        rows=[row for share in shares for row in share.rows],
        micro_batch_indices=[share.indices for share in shares],
        micro_batch_lengths=[list(share.lengths) for share in shares],
        elem_counts_per_gb=[len(share.rows) for share in shares] if with_counts else None,
    )


def _chunks(count: int, shards: int, batch_size: int | None) -> list[range]:
    size = count if batch_size is None else batch_size
    _check_at_least_one(rows=count, shards=shards, batch_size=size)
    if count % size:
        raise UnevenShardsError(
            f"sharding: {count} rows in global batches of {size}; expected a multiple of {size}"
        )
    return [range(start, start + size) for start in range(0, count, size)]


def _check_at_least_one(**numbers: int) -> None:
    for name, number in numbers.items():
        checked_int("sharding", name, number, least=1)


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
