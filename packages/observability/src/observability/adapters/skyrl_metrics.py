"""Metrics that SkyRL logs, with the names of docs/telemetry.md."""

from __future__ import annotations

import re
from collections.abc import Mapping

from observability.step_metrics import record_trainer_metrics

_GAP = "policy/rollout_train_logprobs_abs_diff_mean"
_GAP_OF_MINIBATCHES = "policy/minibatch_rollout_logprobs_abs_diff_mean"
_PASS_AT = re.compile(r"(?<=^eval/all/pass_at_)\d+$")
"""Number of samples of each prompt, at the end of a metric's name."""
_NAMES = {
    "reward/avg_raw_reward": "rl.reward.mean",
    "policy/final_loss": "rl.loss",
    "policy/policy_kl": "rl.kl",
    "policy/policy_entropy": "rl.entropy",
    "policy/clip_ratio": "rl.clip_fraction",
    "policy/grad_norm": "rl.grad_norm",
    "policy/policy_lr": "rl.learning_rate",
    "generate/avg_num_tokens": "rl.response.length",
    "async/staleness_mean": "rl.staleness.mean",
    "async/staleness_max": "rl.staleness.max",
    _GAP: "rl.logprob_gap.mean",
    "eval/all/avg_score": "rl.validation.reward",
    "eval/all/pass_at_n": "rl.validation.pass_rate",
}
"""Names by SkyRL's metric."""


def record_log(completed: int, data: Mapping[str, object], run_id: str) -> None:
    """Record what SkyRL logs after ``completed`` steps."""
    metrics = {_PASS_AT.sub("n", name): value for name, value in data.items()}
    # SkyRL logs only this one if it needs no log-probabilities before the training.
    metrics.setdefault(_GAP, metrics.get(_GAP_OF_MINIBATCHES))
    record_trainer_metrics(completed, metrics, _NAMES, run_id=run_id)
