"""What the rollouts of a step were like, over all batches that dynamic sampling generated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any  # Any: metrics of a rollout and of the generation worker

_MEANS = (
    "avg_turns_per_sample",
    "mean_gen_tokens_per_sample",
    "mean_total_tokens_per_sample",
    "truncation_rate",
    "natural_termination_rate",
    "sequence_full_rate",
    "max_turns_reached_rate",
)
_LARGEST = ("max_turns_per_sample", "max_gen_tokens_per_sample")


class RolloutTotals:
    """Adds batches up. Every sample that was generated counts, also one that is not trained on."""

    def __init__(self) -> None:
        self._samples = 0
        self._sums = dict.fromkeys(_MEANS, 0.0)
        self._largest = dict.fromkeys(_LARGEST, 0.0)
        self._tokens = self._seconds = 0.0

    def add(
        self, samples: int, rollout: Mapping[str, Any], generation: Mapping[str, Any] | None
    ) -> None:
        """Count a batch.

        Args:
            samples: of the batch.
            rollout: its metrics, as `rollout_actor.metrics.rollout_metrics` names them.
            generation: what `GenerationWorker.metrics` says of the batch, None for nothing.
        """
        self._samples += samples
        for name in _MEANS:
            self._sums[name] += rollout[name] * samples
        for name in _LARGEST:
            self._largest[name] = max(self._largest[name], float(rollout[name]))
        self._tokens += (generation or {}).get("tokens", 0)
        self._seconds += (generation or {}).get("seconds", 0.0)

    @property
    def metrics(self) -> dict[str, float]:
        """The rollouts' metrics, a mean being that of all samples, and ``tokens_per_s``: generated
        tokens per second of generation."""
        means = {name: value / max(1, self._samples) for name, value in self._sums.items()}
        rate = self._tokens / self._seconds if self._seconds else 0.0
        return {**means, **self._largest, "tokens_per_s": rate}
