"""Metrics that TRL logs, with the names of docs/telemetry.md."""

from __future__ import annotations

import re
from collections.abc import Mapping

from observability.step_metrics import record_trainer_metrics

_NAMES = {
    "reward": "rl.reward.mean",
    "reward_std": "rl.reward.std",
    "loss": "rl.loss",
    "kl": "rl.kl",
    "entropy": "rl.entropy",
    "clip_ratio/region_mean": "rl.clip_fraction",
    "grad_norm": "rl.grad_norm",
    "learning_rate": "rl.learning_rate",
    "completions/mean_length": "rl.response.length",
    "completions/clipped_ratio": "rl.response.truncated",
    "sample/staleness_mean": "rl.staleness.mean",  # these two of AsyncGRPOTrainer
    "sample/staleness_max": "rl.staleness.max",
    "sampling/sampling_logp_difference/mean": "rl.logprob_gap.mean",
    "eval_reward": "rl.validation.reward",
}
"""Names by TRL's metric."""
_REWARD_COMPONENT = re.compile(r"rewards/(.+)/mean")


def record_logs(
    completed: int, logs: Mapping[str, object], run_id: str, *, samples_per_step: int
) -> None:
    """Record what TRL logs after ``completed`` steps."""
    metrics: dict[str, object] = {}
    components: dict[str, object] = {}
    for name, value in logs.items():
        if match := _REWARD_COMPONENT.fullmatch(name):
            components[match[1]] = value
        elif not name.startswith("train_"):  # TRL's summary of the training
            metrics[name] = value
    if "loss" in metrics:  # not of a validation alone
        metrics["rl.samples"] = completed * samples_per_step
    record_trainer_metrics(completed, metrics, _NAMES, run_id=run_id, components=components)
