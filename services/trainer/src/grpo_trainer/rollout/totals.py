"""Metrics of a step's rollouts, over all batches that dynamic sampling generated."""

from __future__ import annotations

from collections.abc import Mapping
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


class RolloutTotals:
    """Sums over batches. Every generated sample counts, even if it is not trained on."""

    def __init__(self) -> None:
        self._samples = 0
        self._sums = dict.fromkeys(_MEANS, 0.0)
        self._components: dict[str, float] = {}
        self._largest = dict.fromkeys(_LARGEST, 0.0)
        self._mixed: float | None = 0.0
        self._tokens = self._seconds = 0.0

    def add(
        self, samples: int, rollout: Mapping[str, Any], generation: Mapping[str, Any] | None
    ) -> None:
        """Count a batch.

        Args:
            samples: number of samples in the batch.
            rollout: metrics of the batch, from `rollout_actor.metrics.rollout_metrics`.
            generation: metrics of the batch, from `GenerationWorker.metrics`; None for none.
        """
        self._samples += samples
        for name in _MEANS:
            self._sums[name] += rollout[name] * samples
        for name, mean in rollout.items():
            if name.startswith(REWARD_PREFIX):
                self._components[name] = self._components.get(name, 0.0) + mean * samples
        if self._mixed is not None:
            mixed = rollout.get(_VERSIONS)
            self._mixed = None if mixed is None else self._mixed + mixed * samples
        for name in _LARGEST:
            self._largest[name] = max(self._largest[name], float(rollout[name]))
        self._tokens += (generation or {}).get("tokens", 0)
        self._seconds += (generation or {}).get("seconds", 0.0)

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the rollouts, with means over all samples, and generated ``tokens_per_s``."""
        sums = self._sums | self._components
        means = {name: value / max(1, self._samples) for name, value in sums.items()}
        if self._mixed is not None and self._samples:
            means[_VERSIONS] = self._mixed / self._samples
        rate = self._tokens / self._seconds if self._seconds else 0.0
        return {**means, **self._largest, "tokens_per_s": rate}
