"""Metrics of a step's rollouts, over all batches that dynamic sampling generated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any  # Any: metrics of a rollout and of the generation worker

from grpo_trainer.report.step_metrics import REWARD_PREFIX

_MEANS = (
    "avg_turns_per_sample",
    "mean_gen_tokens_per_sample",
    "mean_total_tokens_per_sample",
    "truncation_rate",
    "natural_termination_rate",
    "sequence_full_rate",
    "max_turns_reached_rate",
)
_VERSIONS = "mixed_weight_version_rate"
"""Metric of backends that report the weight version of each token."""

_LARGEST = ("max_turns_per_sample", "max_gen_tokens_per_sample")


RolloutBatch = tuple[int, Mapping[str, Any], Mapping[str, Any] | None]
"""A batch: its number of samples, its metrics from `rollout_actor.metrics.rollout_metrics`, and the
``tokens`` and ``seconds`` of its generation, None if unknown."""


def total_metrics(batches: Sequence[RolloutBatch]) -> dict[str, float]:
    """Return metrics with means over all samples, and generated ``tokens_per_s``.

    Every generated sample counts, even if it is not trained on.
    """
    samples = sum(size for size, _, _ in batches)
    rollouts = [rollout for _, rollout, _ in batches]
    components = [name for each in rollouts for name in each if name.startswith(REWARD_PREFIX)]
    names = [*_MEANS]
    if samples and all(_VERSIONS in rollout for rollout in rollouts):
        names.append(_VERSIONS)
    sums = {name: sum(rollout[name] * size for size, rollout, _ in batches) for name in names}
    for name in dict.fromkeys(components):  # a batch may lack a component
        sums[name] = sum(rollout.get(name, 0.0) * size for size, rollout, _ in batches)
    generations = [generation for _, _, generation in batches if generation]
    seconds = sum(each.get("seconds", 0.0) for each in generations)
    tokens = sum(each.get("tokens", 0) for each in generations)
    return {
        **{name: value / max(1, samples) for name, value in sums.items()},
        **{name: max((float(each[name]) for each in rollouts), default=0.0) for name in _LARGEST},
        "tokens_per_s": tokens / seconds if seconds else 0.0,
    }
