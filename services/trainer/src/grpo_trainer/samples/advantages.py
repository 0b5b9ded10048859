"""Group-relative advantages, computed on the driver from one number per sample.

All results are computed in float64 from the distances to one reward of the group, never from a sum
of rewards. Equal rewards have distance 0, so their advantages are exactly 0. Rewards that are close
together keep all their digits, however large they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from grpo_trainer.errors import AdvantageError

_EPSILON = 1e-4


@dataclass(frozen=True)
class GroupStatistics:
    """Statistics of each sample's group, from the rewards that count.

    Attributes:
        deviation: float64 (n,), the sample's reward minus ``baseline``.
        baseline: float64 (n,), mean reward of the group's other samples (leave-one-out; Ahmadian
            et al. 2024, arXiv:2402.14740).
        std: float64 (n,), standard deviation of the group's rewards (divisor m - 1); exactly 0 if
            they are equal.
        comparable: bool (n,), whether at least two rewards of the group count. If not,
            ``deviation`` and ``std`` are 0.
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
        rewards: float (n,), finite; the samples of a group are adjacent.
        group_size: samples of a group, at least 2.
        counted: bool (n,), true for the samples whose rewards count; None for all.

    Raises:
        AdvantageError: (a ValueError) ``group_size`` does not divide n, or is less than 2; a
            reward is not finite, or so far from another of its group that float64 overflows.
    """
    if group_size < 2 or len(rewards) % group_size:
        raise AdvantageError(f"{len(rewards)} rewards; expected groups of {group_size}, at least 2")
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
    std = _root_of_squares(from_mean) / (size - 1).clamp(min=1).double().sqrt()
    _check_finite(deviation.reshape(-1) + std.expand_as(groups).reshape(-1), rewards, "float64")
    return GroupStatistics(
        deviation.reshape(-1),
        (groups - deviation).reshape(-1),
        std.expand_as(groups).reshape(-1),
        comparable.expand_as(groups).reshape(-1),
    )


def advantages(statistics: GroupStatistics, *, normalize: bool) -> torch.Tensor:
    """Return the rewards minus their baselines, float32 (n,); ``normalize`` divides by the spread.

    Raises:
        AdvantageError: (a ValueError) an advantage exceeds float32, the dtype of the loss.
    """
    deviation = statistics.deviation
    if normalize:
        deviation = deviation / (statistics.std + _EPSILON)
    column = deviation.float()
    _check_finite(column, deviation, "float32")
    return column


def _root_of_squares(distances: torch.Tensor) -> torch.Tensor:
    """Return the root of each row's sum of squares, (n, 1), even if the squares would overflow."""
    scale = distances.abs().amax(1, keepdim=True)
    unit = torch.where(scale > 0, scale, 1.0)
    return (distances / unit).square().sum(1, keepdim=True).sqrt() * scale


def _check_finite(values: torch.Tensor, of: torch.Tensor, kind: str) -> None:
    if not values.isfinite().all():
        row = int(values.isfinite().logical_not().int().argmax())
        raise AdvantageError(
            f"advantages: sample {row}: {float(of[row]):g} gives an advantage that is not a finite "
            f"{kind}; lower grpo.reward_scale, set grpo.normalize_advantages, or bound the "
            "environment's rewards"
        )


def mean_and_std(values: torch.Tensor) -> tuple[float, float]:
    """Return mean and standard deviation of ``values`` (n,), exactly 0 for equal values.

    Raises:
        ValueError: there are no values.
    """
    if not len(values):
        raise ValueError("no values; expected at least one")
    distance = values.double() - values[0].double()
    mean = distance.mean()
    std = _root_of_squares((distance - mean)[None]) / max(1, len(values) - 1) ** 0.5
    return float(values[0].double() + mean), float(std)
