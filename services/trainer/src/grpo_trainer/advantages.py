"""Group-relative advantages; computed on the driver, from a number per sample.

Everything is computed in float64 from the distances to one reward of the group, never from a sum of
the rewards themselves: equal rewards are 0 apart, so their advantages are exactly 0, and rewards
that lie close together keep all their digits however large they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_EPSILON = 1e-4


@dataclass(frozen=True)
class GroupStatistics:
    """Statistics of each sample's group, from the rewards that count.

    Attributes:
        deviation: float64 (n,), the sample's reward minus ``baseline``.
        baseline: float64 (n,), mean reward of the group's other samples (leave-one-out; Ahmadian
            et al. 2024, arXiv:2402.14740).
        std: float64 (n,), standard deviation of the group's rewards (divisor m - 1); 0 exactly if
            they are equal.
        comparable: bool (n,), whether at least two rewards of the group count. If not, there is
            nothing to compare: ``deviation`` and ``std`` are 0.
    """

    deviation: torch.Tensor
    baseline: torch.Tensor
    std: torch.Tensor
    comparable: torch.Tensor


def group_statistics(
    rewards: torch.Tensor, group_size: int, *, counted: torch.Tensor | None = None
) -> GroupStatistics:
    """Compare every sample with the others of its group.

    Args:
        rewards: float (n,), finite, the samples of a group next to each other.
        group_size: samples of a group, at least 2.
        counted: bool (n,), the samples whose rewards enter the statistics; None for all.

    Raises:
        ValueError: ``group_size`` does not divide n, or is less than 2.
    """
    if group_size < 2 or len(rewards) % group_size:
        raise ValueError(f"{len(rewards)} rewards; expected groups of {group_size}, at least 2")
    groups = rewards.double().reshape(-1, group_size)
    if counted is None:
        counted = torch.ones_like(rewards, dtype=torch.bool)
    counts = counted.reshape(-1, group_size)
    first = groups.gather(1, counts.int().argmax(1, keepdim=True))
    distance = groups - first
    counted_distance = torch.where(counts, distance, 0.0)
    total = counted_distance.sum(1, keepdim=True)
    size = counts.sum(1, keepdim=True)
    others = (size - counts.int()).clamp(min=1)
    comparable = size >= 2
    deviation = torch.where(comparable, distance - (total - counted_distance) / others, 0.0)
    from_mean = torch.where(counts, distance - total / size.clamp(min=1), 0.0)
    std = (from_mean.square().sum(1, keepdim=True) / (size - 1).clamp(min=1)).sqrt()
    return GroupStatistics(
        deviation.reshape(-1),
        (groups - deviation).reshape(-1),
        std.expand_as(groups).reshape(-1),
        comparable.expand_as(groups).reshape(-1),
    )


def advantages(statistics: GroupStatistics, *, normalize: bool) -> torch.Tensor:
    """Return the rewards above their baselines, float32 (n,), over the spread if asked."""
    deviation = statistics.deviation
    if normalize:
        deviation = deviation / (statistics.std + _EPSILON)
    return deviation.float()


def mean_and_std(values: torch.Tensor) -> tuple[float, float]:
    """Return mean and standard deviation of ``values`` (n,), the latter 0 exactly if all are equal.

    Raises:
        ValueError: there are no values.
    """
    if not len(values):
        raise ValueError("no values; expected at least one to take the mean of")
    distance = values.double() - values[0].double()
    mean = distance.mean()
    std = (distance - mean).square().sum().div(max(1, len(values) - 1)).sqrt()
    return float(values[0].double() + mean), float(std)
