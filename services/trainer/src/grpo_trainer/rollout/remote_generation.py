"""Client of the generation worker, for the rollout actor.

It is separate from the worker, because the rollout actor loads no model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any  # Any: batches and Ray handles

from dataplane_core.telemetry import inject
from grpo_trainer.actors.calls import ActorCalls

if TYPE_CHECKING:
    from column_io import BatchedDataDict

GENERATION = "generation worker"


class RayGeneration:
    """`rollout_actor.GenerationInterface` that calls the handle of a `GenerationWorker`."""

    _quiet_s = 0.0

    def __init__(self, worker: Any, *, timeout_s: float) -> None:
        self._calls = ActorCalls(timeout_s=timeout_s, quiet_s=self._quiet_s)
        self._calls.add(GENERATION, worker)

    def generate(self, data: BatchedDataDict[Any], *, greedy: bool) -> Mapping[str, Any]:
        """Generate one response per row."""
        response: Mapping[str, Any] = self._calls.call(
            GENERATION, "generate", dict(data), greedy=greedy, carrier=inject()
        )
        return response

    def clear_logger_metrics(self) -> None:
        """Reset the accumulated metrics."""
        self._calls.call(GENERATION, "clear_metrics")

    def get_logger_metrics(self) -> dict[str, Any]:
        """Return the metrics accumulated since the last reset."""
        metrics: dict[str, Any] = self._calls.call(GENERATION, "metrics")
        return metrics

    def finish_generation(self) -> None:
        """Release cached device memory."""
        self._calls.call(GENERATION, "release_memory")


class StreamingGeneration(RayGeneration):
    """`RayGeneration` of concurrent rollouts, which share the worker's metrics and memory."""

    _quiet_s = 30.0  # many rollouts generate all the time

    def weight_version(self) -> str:
        """Return the version id of the weights that the worker holds."""
        version: str = self._calls.call(GENERATION, "weight_version")
        return version

    def clear_logger_metrics(self) -> None:
        """Do nothing: the metrics are those of all rollouts."""

    def get_logger_metrics(self) -> dict[str, Any]:
        """Return no metrics; the generator measures its rollouts."""
        return {}

    def finish_generation(self) -> None:
        """Do nothing: other rollouts continue."""
