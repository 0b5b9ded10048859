"""Metrics of a step as OpenTelemetry metrics, which the admin service draws as curves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any  # Any: metrics of a step

from observability import record_step_metrics

REWARD_PREFIX = "reward/"
"""Prefix of reward components among the metrics of a step; the rollout actor uses the same."""

# Names in docs/trainer.md, mapped to names in docs/telemetry.md.
_TRAINING = {
    "reward": "rl.reward.mean",
    "reward_std": "rl.reward.std",
    "generated_reward": "rl.reward.generated",
    "loss": "rl.loss",
    "kl": "rl.kl",
    "approx_entropy": "rl.entropy",
    "clip_fraction": "rl.clip_fraction",
    "grad_norm": "rl.grad_norm",
    "learning_rate": "rl.learning_rate",
    "mean_gen_tokens_per_sample": "rl.response.length",
    "truncation_rate": "rl.response.truncated",
    "staleness": "rl.staleness.mean",
    "staleness_max": "rl.staleness.max",
    "rollout_logprob_diff_mean": "rl.logprob_gap.mean",
    "rollout_logprob_diff_p99": "rl.logprob_gap.p99",
    "tokens_per_s": "rl.generation.tokens_per_s",
}
_VALIDATION = {
    "validation_reward": "rl.validation.reward",
    "validation_pass_rate": "rl.validation.pass_rate",
}


def record_step(
    step: int, metrics: Mapping[str, Any], *, seconds: float, has_kl: bool, trained: int
) -> None:
    """Record the metrics of step ``step``, counted from 0, whose duration is ``seconds``.

    A validation after the step is recorded for the next step, which has the same weights.
    ``has_kl`` says whether the loss has a KL term. ``trained`` counts the samples trained so far.
    """
    named = {
        name: metrics[key]
        for key, name in _TRAINING.items()
        if key in metrics and (has_kl or key != "kl")
    }
    for key in ("samples", "tokens"):
        named[f"rl.{key}_per_s"] = metrics.get(key, 0) / seconds
    named["rl.samples"] = trained
    components = {
        name.removeprefix(REWARD_PREFIX): value
        for name, value in metrics.items()
        if name.startswith(REWARD_PREFIX)
    }
    record_step_metrics(step, named, components=components)
    validated = {name: metrics[key] for key, name in _VALIDATION.items() if key in metrics}
    record_step_metrics(step + 1, validated)
