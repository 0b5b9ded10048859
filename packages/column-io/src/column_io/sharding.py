"""Sharding of a batch's meta over data-parallel ranks, without fetching a tensor."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Final  # Any: extra_info holds the caller's own values

from column_io.batching_args import DynamicBatchingArgs, SequencePackingArgs
from column_io.shard_plan import (
    RankPlan,
    plan_dynamic_batching,
    plan_even_shards,
    plan_sequence_packing,
)
from dataplane_core import (
    ELEM_COUNTS_PER_GB,
    MICRO_BATCH_INDICES,
    MICRO_BATCH_LENGTHS,
    InvalidRequestError,
    KVBatchMeta,
)
from dataplane_core.arguments import checked_ints

MICRO_BATCH_IDS_DIGEST: Final = "micro_batch_ids_digest"
"""``extra_info`` key of the digest of the ordered ids for which micro-batches were planned."""


def shard_meta_for_dp(
    meta: KVBatchMeta,
    *,
    dp_world: int,
    batch_size: int | None = None,
    sequence_packing_args: SequencePackingArgs | None = None,
    dynamic_batching_args: DynamicBatchingArgs | None = None,
) -> tuple[list[KVBatchMeta], list[int] | None]:
    """Distribute the rows of ``meta`` over ``dp_world`` ranks.

    Args:
        meta: the batch; ``sequence_lengths`` are the tokens of each row.
        dp_world: number of data-parallel ranks.
        batch_size: rows in a global batch (one optimizer step), each distributed separately; None
            means one global batch with all rows.
        sequence_packing_args: pack rows into micro-batches of bounded tokens.
        dynamic_batching_args: group rows of similar length into micro-batches of one width.

    Returns:
        One meta per rank, and the inverse order.

        Each row of ``meta`` is in exactly one of the metas, with its length. Partition, task,
        fields and ``extra_info`` are retained, tags are dropped. With micro-batches, ``extra_info``
        also has the keys of their plan.

        - ``micro_batch_indices``: per global batch a list of [start, stop) relative to its first
            row;
        - ``micro_batch_lengths``: the tokens (packing) or the width (dynamic batching) of each
            micro-batch;
        - ``elem_counts_per_gb``, with packing: rows per global batch;
        - ``micro_batch_ids_digest``: digest of the ordered ids. The plan refers to rows by index,
            so `read_columns` ignores it if rows were picked or moved since.

        All ranks have the same number of micro-batches.

        ``inverse[i]`` is the index of row i in the rank-by-rank concatenation, so that
        ``concatenated.select_indices(inverse)`` restores the order of ``meta``; None if the order
        is unchanged.

    Raises:
        InvalidRequestError: (a ValueError) there are no ids, the number of lengths differs from
            that of ids, both kinds of micro-batches are given, an argument is invalid, a row
            exceeds a micro-batch, or the rows are too few for equally many micro-batches per rank.
        UnevenShardsError: (a ValueError and an AssertionError) the rows cannot be divided evenly.
    """
    operation = f"shard_meta_for_dp(partition={meta.partition_id!r})"
    lengths = meta.sequence_lengths
    if not meta.sample_ids:
        raise InvalidRequestError(f"{operation}: no sample_ids; expected at least one")
    if lengths is None or len(lengths) != meta.size:
        given = "no" if lengths is None else len(lengths)
        raise InvalidRequestError(
            f"{operation}: {given} sequence_lengths for {meta.size} samples; expected one per "
            "sample"
        )
    lengths = checked_ints(operation, "sequence_lengths", lengths)
    if sequence_packing_args is not None and dynamic_batching_args is not None:
        raise InvalidRequestError(
            f"{operation}: both sequence_packing_args and dynamic_batching_args; expected at "
            "most one"
        )
    if sequence_packing_args is not None:
        plans = plan_sequence_packing(
            lengths, dp_world, sequence_packing_args, batch_size=batch_size
        )
    elif dynamic_batching_args is not None:
        plans = plan_dynamic_batching(
            lengths, dp_world, dynamic_batching_args, batch_size=batch_size
        )
    else:
        plans = plan_even_shards(meta.size, dp_world, batch_size=batch_size)
    return [_shard(meta, plan) for plan in plans], _inverse(plans)


def is_planned_for(meta: KVBatchMeta) -> bool:
    """Return whether the plan of micro-batches in ``meta`` was made for its ids in this order.

    A plan by other code has no digest; then only the number of rows is compared.
    """
    rows = sum(cuts[-1][1] for cuts in meta.extra_info[MICRO_BATCH_INDICES] if cuts)
    digest = meta.extra_info.get(MICRO_BATCH_IDS_DIGEST)
    return rows == meta.size and digest in (None, _digest(meta.sample_ids))


def _digest(sample_ids: list[str]) -> str:
    # JSON, because different lists of ids must have different bytes.
    return hashlib.blake2b(json.dumps(sample_ids).encode(), digest_size=16).hexdigest()


def _shard(meta: KVBatchMeta, plan: RankPlan) -> KVBatchMeta:
    shard = meta.subset(plan.rows)
    shard.tags = None
    planned: dict[str, Any] = {
        MICRO_BATCH_INDICES: plan.micro_batch_indices,
        MICRO_BATCH_LENGTHS: plan.micro_batch_lengths,
        ELEM_COUNTS_PER_GB: plan.elem_counts_per_gb,
        MICRO_BATCH_IDS_DIGEST: (
            None if plan.micro_batch_indices is None else _digest(shard.sample_ids)
        ),
    }
    for key, value in planned.items():
        # A plan of an earlier sharding refers to other rows.
        shard.extra_info.pop(key, None)
        if value is not None:
            shard.extra_info[key] = value
    return shard


def _inverse(plans: list[RankPlan]) -> list[int] | None:
    order = [row for plan in plans for row in plan.rows]
    inverse = [0] * len(order)
    for position, row in enumerate(order):
        inverse[row] = position
    return None if order == list(range(len(order))) else inverse
