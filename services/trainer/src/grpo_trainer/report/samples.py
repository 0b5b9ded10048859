"""Facts of generated samples, which the admin service lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any  # Any: columns

import torch

from observability import record_samples

LENGTHS = "response_token_lengths"
"""Column of a rollout with the tokens of each response."""


def record_generated(
    sample_ids: Sequence[str],
    carry: Mapping[str, Any],
    advantages: torch.Tensor,
    *,
    group_size: int,
) -> None:
    """Record facts of samples whose groups are adjacent; a group is named by its first sample."""
    record_samples(
        sample_ids,
        {
            "group": [sample_ids[row // group_size * group_size] for row in range(len(sample_ids))],
            "reward": carry["total_reward"].tolist(),
            "advantage": advantages.tolist(),
            "truncated": carry["truncated"].tolist(),
            "length": carry[LENGTHS].tolist(),
            "state": ["generated"] * len(sample_ids),
        },
    )
