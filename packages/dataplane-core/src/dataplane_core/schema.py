"""Names that producers, consumers and the driver agree on.

The values are wire names: they appear as field names in partitions and as keys in
``KVBatchMeta.extra_info``. Changing one breaks every peer that runs another version.
"""

from __future__ import annotations

from typing import Final, Literal

Layout = Literal["padded", "jagged"]
"""How `column_io.materialize` returns variable-length columns."""

INPUT_IDS: Final = "input_ids"
INPUT_LENGTHS: Final = "input_lengths"
SAMPLE_MASK: Final = "sample_mask"
META_IDX: Final = "meta_idx"
ROUTED_EXPERTS_FIELD: Final = "routed_experts"

Form = Literal["ragged", "shaped"]
"""How the rows of a field relate, where its first rows that were not dense said so.

``ragged``: put as a jagged tensor; a row holds one value per token. ``shaped``: put as a nested
tensor of strided layout; each row (the images of a sample) has a shape of its own.
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
"""Columns that hold one value per token from two dimensions on, and are then stored jagged."""

PER_SAMPLE_TOO: Final[frozenset[str]] = frozenset({"advantages", SAMPLE_MASK})
"""Those of them that may also hold one value per sample, with shape (rows,)."""

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
"""The columns that the training stage reads, in the order in which they come to exist."""

LP_SEED_FIELDS: Final[tuple[str, ...]] = (INPUT_IDS, INPUT_LENGTHS, "token_mask", SAMPLE_MASK)
"""The columns that a logprob stage needs before it can run."""

GLOBAL_FORWARD_PAD_SEQLEN: Final = "global_forward_pad_seqlen"
"""``extra_info`` key: the one sequence width that every reader of the batch pads to."""

MICRO_BATCH_INDICES: Final = "micro_batch_indices"
MICRO_BATCH_LENGTHS: Final = "micro_batch_lengths"
ELEM_COUNTS_PER_GB: Final = "elem_counts_per_gb"
