"""Group-relative advantages; computed on the driver, from a number per sample."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_EPSILON = 1e-4


@dataclass(frozen=True)
class GroupStatistics:
    """Per sample, from the rewards of its group.

    Attributes:
        baseline: float32 (n,), mean reward of the group's other samples (leave-one-out; Ahmadian
            et al. 2024, arXiv:2402.14740).
        std: float32 (n,), standard deviation of the group's rewards.
    """

    baseline: torch.Tensor
    std: torch.Tensor


def group_statistics(rewards: torch.Tensor, group_size: int) -> GroupStatistics:
    """Baseline and spread of every sample's group.

    Args:
        rewards: float (n,), the samples of a group next to each other.
        group_size: samples of a group, at least 2.

    Raises:
        ValueError: ``group_size`` does not divide n, or is less than 2.
    """
    if group_size < 2 or len(rewards) % group_size:
        raise ValueError(f"{len(rewards)} rewards; expected groups of {group_size}, at least 2")
    groups = rewards.float().reshape(-1, group_size)
    others = (groups.sum(1, keepdim=True) - groups) / (group_size - 1)
    std = groups.std(1, keepdim=True).expand_as(groups)
    # Rounding leaves equal rewards a spread of some 1e-8, which is none.
    std = torch.where((groups == groups[:, :1]).all(1, keepdim=True), 0.0, std)
    return GroupStatistics(others.reshape(-1), std.reshape(-1))


def advantages(
    rewards: torch.Tensor, statistics: GroupStatistics, *, normalize: bool
) -> torch.Tensor:
    """Reward above the baseline, float32 (n,), over the group's standard deviation if asked."""
    above = rewards.float() - statistics.baseline
    return above / (statistics.std + _EPSILON) if normalize else above
