"""A batch's meta, dealt to data-parallel ranks without fetching a tensor."""

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
"""``extra_info`` key: digest of the ids, in their order, that the micro-batches are planned for."""


def shard_meta_for_dp(
    meta: KVBatchMeta,
    *,
    dp_world: int,
    batch_size: int | None = None,
    sequence_packing_args: SequencePackingArgs | None = None,
    dynamic_batching_args: DynamicBatchingArgs | None = None,
) -> tuple[list[KVBatchMeta], list[int] | None]:
    """Deal the rows of ``meta`` to ``dp_world`` ranks.

    Args:
        meta: the batch; ``sequence_lengths`` says the tokens of each row.
        dp_world: number of data-parallel ranks.
        batch_size: rows in a global batch (one optimiser step), each dealt on its own; None is the
            whole batch.
        sequence_packing_args: pack rows into micro-batches of bounded tokens.
        dynamic_batching_args: group rows of similar length into micro-batches of one width.

    Returns:
        One meta per rank, and the inverse. Each id of ``meta`` is in exactly one of them, with its
        length; partition, task, fields and ``extra_info`` are kept, tags are not carried. With
        micro-batches, ``extra_info`` has their plan: ``micro_batch_indices`` (per global batch a
        list of [start, stop) relative to its first row), ``micro_batch_lengths`` (tokens of a
        packed one, width of a dynamic one), and with packing ``elem_counts_per_gb`` (rows per
        global batch); all ranks have the same number of micro-batches. The plan names rows by
        place, so ``micro_batch_ids_digest`` says for which ids in which order it was made:
        `read_columns` leaves the plan of a meta out whose rows were picked or moved since.
        ``inverse[i]`` is the place of row i in the rank-by-rank concatenation, so that
        ``concatenated.select_indices(inverse)`` is in the order of ``meta``; None if it is already.

    Raises:
        InvalidRequestError: (a ValueError) without ids, without one length per id, with both kinds
            of micro-batches, on a wrong argument, on a row that exceeds a micro-batch, or with too
            few rows to give each rank as many micro-batches.
        UnevenShardsError: (a ValueError and an AssertionError) if the rows do not divide.
    """
    where = f"shard_meta_for_dp(partition={meta.partition_id!r})"
    lengths = meta.sequence_lengths
    if not meta.sample_ids:
        raise InvalidRequestError(f"{where}: no sample_ids; expected at least one")
    if lengths is None or len(lengths) != meta.size:
        found = "no" if lengths is None else len(lengths)
        raise InvalidRequestError(
            f"{where}: {found} sequence_lengths for {meta.size} samples; expected one per sample"
        )
    lengths = checked_ints(where, "sequence_lengths", lengths)
    if sequence_packing_args is not None and dynamic_batching_args is not None:
        raise InvalidRequestError(
            f"{where}: both sequence_packing_args and dynamic_batching_args; expected at most one"
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
    """Return True if the plan of micro-batches in ``meta`` was made for its ids in this order.

    Only the number of rows can tell where somebody else planned, without a digest.
    """
    rows = sum(cuts[-1][1] for cuts in meta.extra_info[MICRO_BATCH_INDICES] if cuts)
    digest = meta.extra_info.get(MICRO_BATCH_IDS_DIGEST)
    return rows == meta.size and digest in (None, _digest(meta.sample_ids))


def _digest(sample_ids: list[str]) -> str:
    # JSON, so that no two lists of ids have the same bytes.
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
        # What an earlier sharding left refers to other places.
        shard.extra_info.pop(key, None)
        if value is not None:
            shard.extra_info[key] = value
    return shard


def _inverse(plans: list[RankPlan]) -> list[int] | None:
    order = [row for plan in plans for row in plan.rows]
    inverse = [0] * len(order)
    for place, row in enumerate(order):
        inverse[row] = place
    return None if order == list(range(len(order))) else inverse
