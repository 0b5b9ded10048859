"""The back end that a rollout actor sees in front of the generation worker.

Kept apart from the worker: the rollout actor loads no model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any  # Any: batches and Ray handles

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from dataplane_core.telemetry import inject
from grpo_trainer.errors import WorkerError
from grpo_trainer.ray_failures import first_line
from grpo_trainer.waiting import told

if TYPE_CHECKING:
    from column_io import BatchedDataDict


class RayGeneration:
    """`rollout_actor.GenerationInterface` in front of a `GenerationWorker` actor.

    Args:
        worker: the actor's handle.
        timeout_s: deadline of every call, in seconds.
    """

    def __init__(self, worker: Any, *, timeout_s: float) -> None:
        self._worker = worker
        self._timeout_s = timeout_s

    def generate(self, data: BatchedDataDict[Any], *, greedy: bool) -> Mapping[str, Any]:
        """Generate one response per row."""
        return self._call("generate", dict(data), greedy=greedy, carrier=inject())

    def clear_logger_metrics(self) -> None:
        """Start the accumulation of metrics anew."""
        self._call("clear_metrics")

    def get_logger_metrics(self) -> dict[str, Any]:
        """The metrics accumulated since the last clear."""
        return self._call("metrics")

    def finish_generation(self) -> None:
        """Give cached device memory back."""
        self._call("release_memory")

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        reference = getattr(self._worker, method).remote(*args, **kwargs)
        try:
            with told(f"generation worker: {method}"):
                return ray.get(reference, timeout=self._timeout_s)
        except GetTimeoutError:
            ray.cancel(reference)
            raise WorkerError(
                f"generation worker: {method} did not answer within {self._timeout_s:g} s"
            ) from None
        except RayTaskError as error:
            raise WorkerError(
                f"generation worker: {method} failed: {first_line(error.cause)}"
            ) from error
        except RayActorError as error:
            raise WorkerError(
                f"generation worker died during {method}: {first_line(error)}"
            ) from error
