"""Field names that producers, consumers and the driver share.

The values are wire names: field names of partitions and keys of ``KVBatchMeta.extra_info``.
Changing one breaks every peer that runs another version.
"""

from __future__ import annotations

from typing import Final, Literal

Layout = Literal["padded", "jagged"]
"""Layout in which `column_io.materialize` returns variable-length columns."""

INPUT_IDS: Final = "input_ids"
INPUT_LENGTHS: Final = "input_lengths"
SAMPLE_MASK: Final = "sample_mask"
META_IDX: Final = "meta_idx"
ROUTED_EXPERTS_FIELD: Final = "routed_experts"

Form = Literal["ragged", "shaped"]
"""Form of a field's rows, set by the first put that is not dense.

``ragged``: put as a jagged tensor; a row holds one value per token. ``shaped``: put as a nested
tensor of strided layout; rows (the images of a sample) differ in shape.
"""

TOKEN_ALIGNED_FIELDS: Final[frozenset[str]] = frozenset(
    {
        INPUT_IDS,
        "generation_logprobs",
        "prev_logprobs",
        "reference_policy_logprobs",
        "advantages",
        "token_mask",
        SAMPLE_MASK,
        ROUTED_EXPERTS_FIELD,
    }
)
"""Columns that hold one value per token if they have two or more dimensions; stored jagged."""

PER_TOKEN_OR_SAMPLE_FIELDS: Final[frozenset[str]] = frozenset({"advantages", SAMPLE_MASK})
"""Token-aligned columns that may also hold one value per sample, with shape (rows,)."""

DP_TRAIN_FIELDS: Final[tuple[str, ...]] = (
    INPUT_IDS,
    INPUT_LENGTHS,
    "generation_logprobs",
    "prev_logprobs",
    "reference_policy_logprobs",
    "advantages",
    "token_mask",
    SAMPLE_MASK,
)
"""Columns that the training stage reads, in the order in which they are written."""

LP_SEED_FIELDS: Final[tuple[str, ...]] = (INPUT_IDS, INPUT_LENGTHS, "token_mask", SAMPLE_MASK)
"""Columns that a logprob stage needs."""

GLOBAL_FORWARD_PAD_SEQLEN: Final = "global_forward_pad_seqlen"
"""``extra_info`` key of the sequence width to which every reader of the batch pads."""

MICRO_BATCH_INDICES: Final = "micro_batch_indices"
MICRO_BATCH_LENGTHS: Final = "micro_batch_lengths"
ELEM_COUNTS_PER_GB: Final = "elem_counts_per_gb"
