"""Columns that the loss needs, from the rewards of a batch of complete groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from grpo_trainer.config.sections import GRPOSection
from grpo_trainer.samples.advantages import GroupStatistics, advantages, group_statistics

CARRY = ["total_reward", "loss_multiplier", "truncated"]
"""Columns of a rollout from which rewards are shaped, one number per sample each."""


class ShapedRewards(NamedTuple):
    """Result of `shape_rewards`.

    Attributes:
        advantages: float32 (n,).
        sample_mask: float32 (n,), 0 for samples excluded from the loss.
        statistics: statistics of each sample's group.
    """

    advantages: torch.Tensor
    sample_mask: torch.Tensor
    statistics: GroupStatistics

    @property
    def is_informative(self) -> torch.Tensor:
        """Samples in groups of unequal rewards, bool (n,)."""
        return self.statistics.comparable & (self.statistics.std != 0)


def shape_rewards(carry: Mapping[str, torch.Tensor], grpo: GRPOSection) -> ShapedRewards:
    """Compute advantages and mask of samples; samples of a group are adjacent.

    Args:
        carry: the columns `CARRY` of a rollout.
        grpo: group size, scale, normalization and filters.

    Raises:
        AdvantageError: (a ValueError) as `group_statistics` and `advantages`.
    """
    counted = None
    if not grpo.statistics_include_filtered:
        counted = carry["loss_multiplier"] > 0
        if grpo.overlong_filtering:
            counted &= ~carry["truncated"]
    # In float64: in float32 a scale can make different rewards equal, or infinite.
    reward = carry["total_reward"].double() * grpo.reward_scale
    statistics = group_statistics(reward, grpo.num_generations_per_prompt, counted=counted)
    mask = carry["loss_multiplier"].clone()
    if grpo.overlong_filtering:
        mask[carry["truncated"]] = 0.0
    return ShapedRewards(
        advantages(statistics, normalize=grpo.normalize_advantages), mask, statistics
    )
