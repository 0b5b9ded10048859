"""Generation worker for vLLM servers: the methods of `GenerationWorker`, without a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any  # Any: batches

import torch

from column_io import BatchedDataDict
from grpo_trainer.actors.address import bind_to_node_interface
from grpo_trainer.actors.telemetry import RunActor, TelemetrySettings
from grpo_trainer.errors import WorkerError
from grpo_trainer.refit.settings import RefitSettings
from grpo_trainer.rollout.vllm_servers import VllmServers
from observability import emit, traced
from refit_mx import RefitConfigError, RefitFleet
from rollout_actor.vllm import VllmGeneration


class VllmWorker(RunActor):
    """Class of a Ray actor with the methods of `grpo_trainer.rollout.worker.GenerationWorker`.

    Its calls overlap, so that `close` does not wait for another call. ``servers`` has the arguments
    of `VllmServers`, which are started if ``addresses`` is empty. ``generation`` has the arguments
    of `rollout_actor.vllm.VllmGeneration`. In an ``asynchronous`` run a response may have tokens of
    several versions of the weights.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        servers: Mapping[str, Any],
        generation: Mapping[str, Any],
        asynchronous: bool = False,
        telemetry: TelemetrySettings | None = None,
    ) -> None:
        self._start_telemetry(telemetry, "grpo.generation")
        self._addresses = list(addresses)
        self._servers = VllmServers(**servers)
        self._arguments = generation
        self._generation: VllmGeneration | None = None
        self._fleet: RefitFleet | None = None
        self._version: str | None = None
        # Versions that tokens may have in an asynchronous run: all that were installed and, during
        # a refit, the next one. None in a synchronous run, where only `_version` is right.
        self._installed: set[str] | None = set() if asynchronous else None

    def ready(self) -> None:
        """Start the servers, if any, and return once all serve.

        Raises:
            WorkerError: a server does not start, or lacks what an asynchronous run needs.
        """
        bind_to_node_interface()
        if not self._addresses:
            self._addresses = self._servers.start()
        if self._installed is not None:
            self._require_weight_versions()
        self._generation = VllmGeneration(self._addresses, **self._arguments)

    def _require_weight_versions(self) -> None:
        prompt: BatchedDataDict[Any] = BatchedDataDict(
            input_ids=torch.zeros(1, 1, dtype=torch.int64),
            input_lengths=torch.ones(1, dtype=torch.int64),
        )
        for address in self._addresses:
            probe = VllmGeneration([address], **{**self._arguments, "max_new_tokens": 1})
            try:
                reported = "weight_versions" in probe.generate(prompt, greedy=True)
            finally:
                probe.close()
            if not reported:
                raise WorkerError(
                    f"policy.generation.backend 'vllm': {address} reports no weight_versions, from "
                    "which grpo.mode async computes staleness; use vLLM 0.32 or later, or "
                    "grpo.mode sync"
                )

    def begin(self, stream: str) -> None:
        """Start a random stream; its name determines what the following calls draw."""
        self._backend.begin(stream)

    @traced(bucket="productive")
    def generate(self, data: Mapping[str, Any], *, greedy: bool) -> Mapping[str, Any]:
        """Generate one response per row; see `rollout_actor.GenerationInterface.generate`.

        Raises:
            WorkerError: a server generated with other weights than the installed ones.
            DataPlaneError: no server can answer.
        """
        output = self._backend.generate(BatchedDataDict(data), greedy=greedy)
        versions = {
            span["version"] for spans in output.get("weight_versions", ()) for span in spans
        }
        wrong = versions - ({self._version} if self._installed is None else self._installed)
        if wrong:  # a restarted server serves the weights of its launch
            raise WorkerError(
                f"vLLM generated with the weights {', '.join(sorted(wrong))}; expected "
                f"{self._version}, which the last refit installed on {self._addresses}"
            )
        return output

    def join_refit(self, settings: RefitSettings) -> None:
        """Prepare to refit the servers."""
        self._fleet = RefitFleet(
            self._addresses,
            timeout_s=settings.timeout_s,
            pause_mode="keep",
            init_info={
                "control_address": settings.control,
                "model_name": settings.model_name,
                "transport": settings.transport,
                "timeout_s": settings.timeout_s,
            },
        )

    @traced(bucket="overhead")
    def install_weights(self, version_id: str) -> None:
        """Install a published version on all servers.

        Raises:
            RefitError: a server failed; no server generates with mixed weights.
        """
        if self._fleet is None:
            raise RefitConfigError("the generation worker has not joined a refit")
        if self._installed is not None:
            self._installed.add(version_id)
        self._fleet.refit(version_id)
        self._version = version_id
        emit("refit_installed")

    def weight_version(self) -> str:
        """Return the version id of the installed weights; empty before the first refit."""
        return self._version or ""

    def metrics(self) -> dict[str, Any]:
        """Return the metrics since `clear_metrics`."""
        return self._backend.get_logger_metrics()

    def clear_metrics(self) -> None:
        """Reset the metrics."""
        self._backend.clear_logger_metrics()

    def release_memory(self) -> None:
        """Do nothing: the servers hold the memory."""

    def close(self) -> None:
        """Stop the servers that this worker started; calls that wait for them fail."""
        self._servers.close()

    @property
    def _backend(self) -> VllmGeneration:
        if self._generation is None:
            raise WorkerError("the generation worker's servers are not ready")
        return self._generation
