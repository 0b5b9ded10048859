"""Start and stop of a run's processes on Ray.

`RunActors` holds everything that a run starts, so that one `close`, after success or any error,
leaves neither processes nor a data plane behind.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
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
from grpo_trainer.actors.calls import ActorCalls, Observer
from grpo_trainer.actors.telemetry import SHUTDOWN_S, TelemetrySettings
from grpo_trainer.config.loading import TrainerConfig
from grpo_trainer.config.sections import ClusterSection, VllmSection
from grpo_trainer.errors import WorkerError, first_line
from grpo_trainer.model.chat_turn import EndKeepingTokenizer, chat_turn
from grpo_trainer.policy.ranks import PolicyRanks
from grpo_trainer.policy.streaming_worker import StreamingPolicyWorker
from grpo_trainer.policy.worker import PolicyWorker
from grpo_trainer.refit.weight_sync import RefitWeightSync
from grpo_trainer.rollout.batch import TASK
from grpo_trainer.rollout.environment import VerifierEnvironment
from grpo_trainer.rollout.generator import Generator, RolloutActor
from grpo_trainer.rollout.latency import SimulatedLatency
from grpo_trainer.rollout.remote_generation import (
    GENERATION,
    RayGeneration,
    StreamingGeneration,
)
from grpo_trainer.rollout.vllm_options import worker_arguments
from grpo_trainer.rollout.worker import GenerationWorker
from observability import TracedHandle

ROLLOUT = "rollout actor"
ENVIRONMENT = "environment"

VLLM_STOP_S = 25.0
"""Seconds that the generation worker may take to stop the servers that it started."""

_ACTOR_CPUS = 0.1
"""Logical CPUs that each actor requests: most of them wait for each other."""

_POLL_S = 0.5
_PLACEMENT = "cluster.placement and data_plane.unit_resources"


def _discard_event(event: dict[str, Any]) -> None:
    """Discard an event: log lines would break the driver's display and fill workers' logs."""


_OBSERVED = cast("ObservabilityConfig", {"enabled": True, "callback": _discard_event})


class GeneratorActors(NamedTuple):
    """Names of the actors of a generator.

    Attributes:
        rollout: its rollout actor.
        worker: its generation worker.
    """

    rollout: str
    worker: str


class RunActors:
    """Processes of one run: data plane, environment, generation, rollouts, policy.

    The workers load ``model``; logs of servers go to ``folder``; ``notice`` is called with a line
    before each part that takes seconds to start.

    Raises:
        WorkerError: Ray or a process cannot be started, or Ray lacks resources. All started
            processes are stopped.
        DataPlaneError: the data plane cannot be started.

    Attributes:
        calls: the actors by name.
        policy_workers: names of the policy workers that were started, by rank.
        policy_ranks: process group of the live policy workers.
        generators: the generators that take part; a synchronous run has one.
        data_plane: the driver's client, which owns the data plane.
        weight_sync: transfer of the policy's weights to the generation worker.
    """

    calls: ActorCalls
    data_plane: DataPlaneClient
    weight_sync: RefitWeightSync
    policy_ranks: PolicyRanks

    def __init__(
        self,
        config: TrainerConfig,
        *,
        model: str,
        tokenizer: Any,
        folder: Path = Path(),
        observer: Observer | None = None,
        telemetry: TelemetrySettings | None = None,
        notice: Callable[[str], object] = lambda line: None,
    ) -> None:
        self._config = config
        self._folder = folder
        self._telemetry = telemetry
        self._started_ray = False
        self._has_data_plane = False
        self._has_weight_sync = False
        self.calls = ActorCalls(timeout_s=config.cluster.call_timeout_s, observer=observer)
        self.policy_workers = [f"policy worker {i}" for i in range(config.policy.data_parallel)]
        self._is_async = config.grpo.mode == "async"
        self.generators: list[GeneratorActors] = []
        self._started_generators = 0
        try:
            joins = ray.is_initialized() or config.cluster.address is not None
            address = config.cluster.address
            notice("starting Ray" if address is None else f"connecting to Ray at {address}")
            self._started_ray = _start_ray(config.cluster)
            wait_for_resources(config, timeout_s=config.cluster.nodes_timeout_s if joins else 0.0)
            notice("starting the data plane")
            self.data_plane = build_data_plane_client(
                _without_log_lines(self._plane), bootstrap=True
            )
            self._has_data_plane = True
            notice("starting the rollout actor, the generation worker and the policy workers")
            self._start_rollouts(model, tokenizer)
            self._start_policy(model, tokenizer.pad_token_id)
            workers = [names.worker for names in self.generators]
            loading = [*workers, *self.policy_workers]
            self.calls.each("ready", {name: ((), {}) for name in loading})
            self.policy_ranks = PolicyRanks(
                self.calls,
                self.policy_workers,
                client=self.data_plane,
                changed=lambda names: self.weight_sync.replace_sources(names),
                continues=config.policy.when_rank_dies == "proceed",
                notice=notice,
            )
            self.weight_sync = RefitWeightSync(
                self.calls,
                config.refit,
                name=config.run.name,
                sources=self.policy_workers,
                targets=workers,
            )
            self._has_weight_sync = True
        except BaseException:  # no process may stay behind, whatever the error
            self.close()
            raise

    @property
    def _plane(self) -> DataPlaneConfig:
        """Configuration of the data plane, with observability if the run is traced."""
        if self._telemetry is None:
            return self._config.data_plane
        return {**self._config.data_plane, "observability": _OBSERVED}

    def _start_rollouts(self, model: str, tokenizer: Any) -> None:
        config = self._config
        rendered = chat_turn(tokenizer, config.policy.model)
        # A string says why follow-ups cannot be rendered. Then the data has none: `read_inputs`
        # refuses data with follow-ups.
        turn = None if isinstance(rendered, str) else rendered
        environment = (
            ray.remote(VerifierEnvironment)
            .options(num_cpus=_ACTOR_CPUS, resources=config.cluster.placement.environment)
            .remote(
                correct=config.env.correct,
                wrong=config.env.wrong,
                chat_turn=turn,
                telemetry=self._telemetry,
            )
        )
        self.calls.actors[ENVIRONMENT] = environment
        self._rollout_arguments = (
            tokenizer if turn is None else EndKeepingTokenizer(tokenizer),
            {TASK: TracedHandle(environment)},
            config.model_dump(mode="json"),
            self._plane,
        )
        self._model, self._pad_token_id = model, tokenizer.pad_token_id
        section = config.grpo.asynchronous
        for _ in range(section.generators if self._is_async else 1):
            self.generators.append(self.start_generator())

    def start_generator(self) -> GeneratorActors:
        """Start a generation worker and its rollout actor, without waiting until they are ready."""
        config = self._config
        names = GeneratorActors(
            _numbered(ROLLOUT, self._started_generators),
            _numbered(GENERATION, self._started_generators),
        )
        self._started_generators += 1
        worker = self._start_generation(self._model, self._pad_token_id)
        self.calls.actors[names.worker] = worker
        timeout_s = config.cluster.call_timeout_s
        options: dict[str, Any] = {
            "num_cpus": _ACTOR_CPUS,
            "resources": config.cluster.placement.rollout,
        }
        if self._is_async:
            # A generator answers requests for reports and validation while it generates.
            actor = Generator.options(**options, max_concurrency=4)
            generation: RayGeneration = StreamingGeneration(worker, timeout_s=timeout_s)
        else:
            actor = RolloutActor.options(**options)
            generation = RayGeneration(worker, timeout_s=timeout_s)
        self.calls.actors[names.rollout] = actor.remote(
            self._telemetry, generation, *self._rollout_arguments
        )
        return names

    def admit_generator(self, names: GeneratorActors) -> None:
        """Let a started generator take part in the next refit."""
        self.weight_sync.add_target(names.worker)
        self.generators.append(names)

    def remove_generator(self, names: GeneratorActors) -> None:
        """Kill the actors of a generator, and leave it out of later refits."""
        self.generators.remove(names)
        self.weight_sync.remove_target(names.worker)
        for name in names:
            self.calls.remove(name)

    def _start_generation(self, model: str, pad_token_id: int) -> Any:
        config, generation = self._config, self._config.policy.generation
        section = config.grpo.asynchronous
        calls = 2  # generate, and install or close
        if self._is_async:
            calls = section.concurrent_rollouts + 3  # install, metrics and validation
        options = {
            "num_cpus": _ACTOR_CPUS,
            "num_gpus": generation.num_gpus,
            "resources": config.cluster.placement.generation,
        }
        if isinstance(generation, VllmSection):
            # Imported here: it needs httpx, which the other backend does not.
            from grpo_trainer.rollout.vllm_worker import VllmWorker

            arguments = worker_arguments(
                config,
                generation,
                model=model,
                pad_token_id=pad_token_id,
                folder=self._folder,
                telemetry=self._telemetry,
            )
            worker = ray.remote(VllmWorker).options(**options, max_concurrency=calls)
            return worker.remote(
                **arguments, asynchronous=self._is_async, telemetry=self._telemetry
            )
        worker = ray.remote(GenerationWorker).options(
            **options, max_concurrency=calls if self._is_async else 1
        )
        latency = generation.simulated_latency
        return worker.remote(
            model,
            max_new_tokens=generation.max_new_tokens,
            max_total_sequence_length=config.policy.max_total_sequence_length,
            temperature=generation.temperature,
            seed=config.run.seed,
            num_threads=generation.num_threads,
            device="cuda" if generation.num_gpus > 0 else "cpu",
            asynchronous=self._is_async,
            partial_rollouts=self._is_async and section.partial_rollouts,
            latency=None if latency is None else SimulatedLatency(latency.median_s, latency.sigma),
            telemetry=self._telemetry,
        )

    def _start_policy(self, model: str, pad_token_id: int) -> None:
        config = self._config
        for rank, name in enumerate(self.policy_workers):
            self.calls.actors[name] = (
                ray.remote(StreamingPolicyWorker if self._is_async else PolicyWorker)
                .options(
                    num_cpus=_ACTOR_CPUS,
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
                    telemetry=self._telemetry,
                )
            )

    def close(self) -> None:
        """Stop every process of the run; closing twice is fine.

        The others are stopped even if one cannot be stopped, or an interrupt ends the wait for it.
        """
        with ExitStack() as stack:  # calls the last callback first
            if self._started_ray:
                self._started_ray = False
                stack.enter_context(_restored_sigterm_handler())
                stack.callback(ray.shutdown)
            if self._has_data_plane:
                self._has_data_plane = False
                stack.callback(self.data_plane.close)
            if self._has_weight_sync:
                self._has_weight_sync = False
                stack.callback(self.weight_sync.close)
            stack.callback(self.calls.stop)
            if self._telemetry is not None:
                stack.callback(self.calls.shutdown_telemetry, 2 * SHUTDOWN_S)
            if isinstance(self._config.policy.generation, VllmSection):
                for names in self.generators:
                    stack.callback(self.calls.close, names.worker, VLLM_STOP_S)


def _numbered(name: str, number: int) -> str:
    """Return the name of one of several actors; the first keeps the plain name."""
    return f"{name} {number}" if number else name


def _without_log_lines(plane: DataPlaneConfig) -> DataPlaneConfig:
    """Return ``plane`` without a log line per operation, which would break the driver's display."""
    observed = plane.get("observability")
    if observed is None or not observed["enabled"]:
        return plane
    return {**plane, "observability": {"callback": _discard_event, **observed}}


def _start_ray(cluster: ClusterSection) -> bool:
    """Connect to the cluster or start one; return whether this run must call `ray.shutdown`."""
    if ray.is_initialized():
        return False
    common: dict[str, Any] = {
        "namespace": "grpo-trainer",
        "logging_level": "ERROR",
        "log_to_driver": False,
    }
    try:
        with _restored_sigterm_handler():
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
def _restored_sigterm_handler() -> Iterator[None]:
    """Restore the process's SIGTERM handler afterwards.

    When Ray starts, it sets a handler that prints a stack and ends the process at once. When it
    stops, it sets the default.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # signals belong to the main thread
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def wait_for_resources(config: TrainerConfig, *, timeout_s: float) -> None:
    """Wait until Ray has the resources of the run's processes: nodes may join after the driver.

    Raises:
        WorkerError: resources are missing at the deadline; Ray would wait for them forever.
    """
    needed = _needed(config)
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            available = call_within(config.cluster.call_timeout_s, ray.cluster_resources)
        except TimeoutError:
            raise WorkerError(
                f"Ray's control store did not answer in {config.cluster.call_timeout_s:g} s"
            ) from None
        missing = [need for need in needed if available.get(need.resource, 0.0) < need.amount]
        if not missing:
            return
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            break
        time.sleep(min(_POLL_S, remaining_s))
    first = missing[0]
    waited = f" after {timeout_s:g} s" if timeout_s > 0 else ""
    raise WorkerError(
        f"{first.key}: the run's processes need {first.amount:g} of the resource "
        f"{first.resource}, Ray has {available.get(first.resource, 0.0):g}{waited}"
    )


class _Needed(NamedTuple):
    """Amount of a Ray resource that the processes need, and the key that sets it."""

    resource: str
    key: str
    amount: float


def _needed(config: TrainerConfig) -> list[_Needed]:
    policy = config.policy
    generators = config.grpo.asynchronous.generators if config.grpo.mode == "async" else 1
    plane = 2 + config.data_plane["num_storage_units"]  # directory, controller and storage units
    actors = 1 + 2 * generators + policy.data_parallel + plane  # 1: the environment
    gpus = (
        policy.generation.num_gpus * generators + policy.data_parallel * policy.num_gpus_per_worker
    )
    custom: dict[str, float] = defaultdict(float)
    placement = config.cluster.placement
    for resources, times in (
        (placement.policy, policy.data_parallel),
        (placement.generation, generators),
        (placement.rollout, generators),
        (placement.environment, 1),
    ):
        for name, amount in resources.items():
            custom[name] += amount * times
    for name, amount in config.data_plane.get("unit_resources", {}).items():
        custom[name] += amount * config.data_plane["num_storage_units"]
    return [
        _Needed("CPU", "cluster.num_cpus", actors * _ACTOR_CPUS),
        _Needed("GPU", "GPUs", gpus),
        *(_Needed(name, _PLACEMENT, amount) for name, amount in custom.items()),
    ]
