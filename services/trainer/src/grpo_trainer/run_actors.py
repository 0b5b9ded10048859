"""Starts the processes of a run on Ray, and takes them down.

Everything that a run starts is held by `RunActors`, so that one `close`, on success and on every
error alike, leaves neither processes nor a data plane behind.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast  # Any: Ray handles and transformers' tokenizers

import ray

from dataplane_core import (
    DataPlaneClient,
    DataPlaneConfig,
    ObservabilityConfig,
    build_data_plane_client,
)
from dataplane_core.deadlines import call_within
from dataplane_tq import join_ray, start_local_ray
from grpo_trainer.actor_calls import ActorCalls, Observer
from grpo_trainer.chat_turn import EndKeepingTokenizer, chat_turn
from grpo_trainer.config import TrainerConfig
from grpo_trainer.environment import VerifierEnvironment
from grpo_trainer.errors import WorkerError
from grpo_trainer.generation import GenerationWorker
from grpo_trainer.policy_worker import PolicyWorker
from grpo_trainer.ray_failures import first_line
from grpo_trainer.ray_generation import RayGeneration
from grpo_trainer.reporting import SHUTDOWN_S, Reporting, ReportingActor
from grpo_trainer.rollout_batch import TASK
from grpo_trainer.sections import ClusterSection
from grpo_trainer.weight_sync import RefitWeightSync
from observability import TracedHandle
from rollout_actor import SyncRolloutActor

GENERATION = "generation worker"
ROLLOUT = "rollout actor"
ENVIRONMENT = "environment"

_SMALL = 0.1
_LOOK_AGAIN_S = 0.5
_PLACEMENT = "cluster.placement and data_plane.unit_resources"


def _unheard(event: dict[str, Any]) -> None:
    """No line per operation: it would tear the driver's display apart and fill workers' logs."""


_OBSERVED = cast("ObservabilityConfig", {"enabled": True, "callback": _unheard})


class RolloutActor(SyncRolloutActor, ReportingActor):
    """`SyncRolloutActor` that reports; its other arguments follow."""

    def __init__(self, reporting: Reporting | None, *args: Any, **kwargs: Any) -> None:
        self._report(reporting, "grpo.rollout")
        super().__init__(*args, **kwargs)


class RunActors:
    """The processes of one run: data plane, environment, generation, rollouts, policy.

    Args:
        config: the run's configuration.
        model: folder or hub name that the workers load.
        tokenizer: the model's tokenizer.
        observer: see `ActorCalls`.
        reporting: how the processes report, None not to.
        notice: called with a line before each part that takes seconds to start.

    Raises:
        WorkerError: Ray or a process cannot be started, or Ray has no room for them. What was
            started is stopped.
        DataPlaneError: the data plane cannot be started.

    Attributes:
        calls: the actors by name.
        policy_workers: names of the policy workers, by rank.
        data_plane: the driver's client, which owns the data plane.
        weight_sync: brings the policy's weights to the generation worker.
    """

    calls: ActorCalls
    data_plane: DataPlaneClient
    weight_sync: RefitWeightSync

    def __init__(
        self,
        config: TrainerConfig,
        *,
        model: str,
        tokenizer: Any,
        observer: Observer | None = None,
        reporting: Reporting | None = None,
        notice: Callable[[str], object] = lambda line: None,
    ) -> None:
        self._config = config
        self._reporting = reporting
        self._started_ray = False
        self._has_data_plane = False
        self._has_weight_sync = False
        self.calls = ActorCalls(timeout_s=config.cluster.call_timeout_s, observer=observer)
        self.policy_workers = [f"policy worker {i}" for i in range(config.policy.data_parallel)]
        try:
            joins = ray.is_initialized() or config.cluster.address is not None
            address = config.cluster.address
            notice("starting Ray" if address is None else f"connecting to Ray at {address}")
            self._started_ray = _start_ray(config.cluster)
            wait_for_room(config, timeout_s=config.cluster.nodes_timeout_s if joins else 0.0)
            notice("starting the data plane")
            self.data_plane = build_data_plane_client(_quiet(self._plane), bootstrap=True)
            self._has_data_plane = True
            notice("starting the rollout actor, the generation worker and the policy workers")
            self._start_rollouts(model, tokenizer)
            self._start_policy(model, tokenizer.pad_token_id)
            loading = [GENERATION, *self.policy_workers]
            self.calls.each("ready", {name: ((), {}) for name in loading})
            meeting = self.calls.one(self.policy_workers[0], "meeting_point")
            self.calls.each("meet", {name: (meeting, {}) for name in self.policy_workers})
            self.weight_sync = RefitWeightSync(
                self.calls,
                config.refit,
                name=config.run.name,
                sources=self.policy_workers,
                targets=[GENERATION],
            )
            self._has_weight_sync = True
        except BaseException:
            self.close()
            raise

    @property
    def _plane(self) -> DataPlaneConfig:
        """The data plane's configuration; whoever traces sees what it does."""
        if self._reporting is None:
            return self._config.data_plane
        return {**self._config.data_plane, "observability": _OBSERVED}

    def _start_rollouts(self, model: str, tokenizer: Any) -> None:
        config = self._config
        placement = config.cluster.placement
        found = chat_turn(tokenizer, config.policy.model)
        turn = None if isinstance(found, str) else found  # where it cannot be asked, nothing is
        environment = (
            ray.remote(VerifierEnvironment)
            .options(num_cpus=_SMALL, resources=placement.environment)
            .remote(
                correct=config.env.correct,
                wrong=config.env.wrong,
                chat_turn=turn,
                reporting=self._reporting,
            )
        )
        self.calls.add(ENVIRONMENT, environment)
        generation = config.policy.generation
        worker = (
            ray.remote(GenerationWorker)
            .options(num_cpus=_SMALL, num_gpus=generation.num_gpus, resources=placement.generation)
            .remote(
                model,
                max_new_tokens=generation.max_new_tokens,
                max_total_sequence_length=config.policy.max_total_sequence_length,
                temperature=generation.temperature,
                seed=config.run.seed,
                num_threads=generation.num_threads,
                device="cuda" if generation.num_gpus > 0 else "cpu",
                reporting=self._reporting,
            )
        )
        self.calls.add(GENERATION, worker)
        rollout = RolloutActor.options(num_cpus=_SMALL, resources=placement.rollout).remote(
            self._reporting,
            RayGeneration(worker, timeout_s=config.cluster.call_timeout_s),
            tokenizer if turn is None else EndKeepingTokenizer(tokenizer),
            {TASK: TracedHandle(environment)},
            config.model_dump(mode="json"),
            self._plane,
        )
        self.calls.add(ROLLOUT, rollout)

    def _start_policy(self, model: str, pad_token_id: int) -> None:
        config = self._config
        for rank, name in enumerate(self.policy_workers):
            handle = (
                ray.remote(PolicyWorker)
                .options(
                    num_cpus=_SMALL,
                    num_gpus=config.policy.num_gpus_per_worker,
                    resources=config.cluster.placement.policy,
                )
                .remote(
                    rank,
                    config.policy.data_parallel,
                    model=model,
                    policy=config.policy.model_dump(mode="json"),
                    grpo=config.grpo.model_dump(mode="json"),
                    data_plane=self._plane,
                    pad_token_id=pad_token_id,
                    timeout_s=config.cluster.call_timeout_s,
                    reporting=self._reporting,
                )
            )
            self.calls.add(name, handle)

    def close(self) -> None:
        """Stop every process of the run; closing twice is fine."""
        try:
            if self._reporting is not None:
                self.calls.end_reports(2 * SHUTDOWN_S)
            self.calls.stop()
            if self._has_weight_sync:
                self._has_weight_sync = False
                self.weight_sync.close()
            if self._has_data_plane:
                self._has_data_plane = False
                self.data_plane.close()
        finally:
            if self._started_ray:
                self._started_ray = False
                with _own_sigterm():
                    ray.shutdown()


def _quiet(plane: DataPlaneConfig) -> DataPlaneConfig:
    """For the driver, whose display a line per operation would tear apart."""
    observed = plane.get("observability")
    if observed is None or not observed["enabled"]:
        return plane
    return {**plane, "observability": {"callback": _unheard, **observed}}


def _start_ray(cluster: ClusterSection) -> bool:
    """Connect to the cluster or start one; True if this run has to shut it down."""
    if ray.is_initialized():
        return False
    common: dict[str, Any] = {
        "namespace": "grpo-trainer",
        "logging_level": "ERROR",
        "log_to_driver": False,
    }
    try:
        with _own_sigterm():
            if cluster.address is not None:
                join_ray(cluster.address, **common)
            else:
                folder = None if cluster.temp_dir is None else str(cluster.temp_dir.resolve())
                start_local_ray(
                    num_cpus=cluster.num_cpus, include_dashboard=False, _temp_dir=folder, **common
                )
    except (RuntimeError, OSError, ValueError) as error:
        raise WorkerError(f"Ray cannot be started: {first_line(error)}") from error
    return True


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Keep the process's handler of SIGTERM. Ray sets one of its own when it starts, which prints a
    stack and ends the process at once, and the system's when it ends."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals belong to the main thread
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def wait_for_room(config: TrainerConfig, *, timeout_s: float) -> None:
    """Return once Ray has the resources of the run's processes: nodes may join after the driver.

    Args:
        config: the run's configuration.
        timeout_s: how long they may take, in seconds; 0 to look once.

    Raises:
        WorkerError: they are not there in time. Ray would let the processes wait without end.
    """
    needed = _needed(config)
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            found = call_within(config.cluster.call_timeout_s, ray.cluster_resources)
        except TimeoutError:
            raise WorkerError(
                f"Ray's control store did not answer in {config.cluster.call_timeout_s:g} s"
            ) from None
        lacking = [one for one in needed if found.get(one.resource, 0.0) < one.amount]
        if not lacking:
            return
        left = deadline - time.monotonic()
        if left <= 0:
            break
        time.sleep(min(_LOOK_AGAIN_S, left))
    first = lacking[0]
    waited = f" after {timeout_s:g} s" if timeout_s > 0 else ""
    raise WorkerError(
        f"{first.key}: the run's processes need {first.amount:g} of the resource "
        f"{first.resource}, Ray has {found.get(first.resource, 0.0):g}{waited}"
    )


class _Needed(NamedTuple):
    """How much of a resource of Ray the run's processes ask for, and the key that says so."""

    resource: str
    key: str
    amount: float


def _needed(config: TrainerConfig) -> list[_Needed]:
    policy = config.policy
    actors = 3 + policy.data_parallel + 2 + config.data_plane["num_storage_units"]
    gpus = policy.generation.num_gpus + policy.data_parallel * policy.num_gpus_per_worker
    custom: dict[str, float] = defaultdict(float)
    placement = config.cluster.placement
    for asked, times in (
        (placement.policy, policy.data_parallel),
        (placement.generation, 1),
        (placement.rollout, 1),
        (placement.environment, 1),
    ):
        for name, amount in asked.items():
            custom[name] += amount * times
    for name, amount in config.data_plane.get("unit_resources", {}).items():
        custom[name] += amount * config.data_plane["num_storage_units"]
    return [
        _Needed("CPU", "cluster.num_cpus", actors * _SMALL),
        _Needed("GPU", "GPUs", gpus),
        *(_Needed(name, _PLACEMENT, amount) for name, amount in custom.items()),
    ]
