"""How new weights reach the generators: a small protocol, and the plain way over Ray's store."""

from __future__ import annotations

from typing import Protocol

from dataplane_core.telemetry import inject
from grpo_trainer.actor_calls import ActorCalls


class WeightSync(Protocol):
    """Brings the policy's weights to the generation workers."""

    def sync(self, version: int) -> None:
        """Install the policy's current weights as ``version`` on every generation worker.

        Returns once all of them serve it. Does nothing if they already do.

        Raises:
            WorkerError: a worker died, failed or did not answer in time.
        """


class RayObjectWeightSync:
    """`WeightSync` by one object in Ray's store.

    The first policy worker puts its weights, the generation workers read them. The driver passes
    the reference on; the weights do not pass through it.

    Args:
        calls: the run's actors.
        source: name of the policy worker that publishes.
        targets: names of the generation workers.
    """

    def __init__(self, calls: ActorCalls, *, source: str, targets: list[str]) -> None:
        self._calls = calls
        self._source = source
        self._targets = targets
        self._installed: int | None = None

    def sync(self, version: int) -> None:
        """See `WeightSync.sync`."""
        if version == self._installed:
            return
        carrier = {"carrier": inject()}
        [reference] = self._calls.one(self._source, "publish_weights", **carrier)
        self._calls.each(
            "install_weights", dict.fromkeys(self._targets, ((reference, version), carrier))
        )
        self._installed = version
