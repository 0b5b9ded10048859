"""The sections of a configuration, as pydantic models without defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
# YAML has no paths and no tuples: these two accept text and lists although sections are strict.
FilePath = Annotated[Path, Field(strict=False)]
Betas = Annotated[tuple[Fraction, Fraction], Field(strict=False)]


class Section(BaseModel):
    """Mapping of the YAML. It refuses unknown keys, and text or a bool in place of a number."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class RunSection(Section):
    """A run's folder and the seed of all its randomness.

    Attributes:
        name: folder below ``output``.
        output: folder of all runs.
        seed: seed of the prompts' order, of a random model and of sampling.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$")]
    output: FilePath
    seed: NonNegativeInt


MIN_RESOURCE = 1e-4
"""Minimum amount of a resource that Ray can assign."""

CustomResources = dict[str, Annotated[float, Field(ge=MIN_RESOURCE)]]
_NOT_CUSTOM = ("", "CPU", "GPU", "memory", "object_store_memory")


class PlacementSection(Section):
    """Custom Ray resources that place each process on a node that has them.

    Each key maps resources to amounts; an empty mapping allows any node. The resources of storage
    units are in ``data_plane.unit_resources``.

    Attributes:
        policy: resources of each policy worker.
        generation: resources of the generation worker.
        rollout: resources of the rollout actor.
        environment: resources of the environment.
    """

    policy: CustomResources
    generation: CustomResources
    rollout: CustomResources
    environment: CustomResources

    @model_validator(mode="after")
    def _resources_are_custom(self) -> PlacementSection:
        for role, resources in self:
            for name in resources:
                if name in _NOT_CUSTOM:
                    raise ValueError(
                        f"cluster.placement.{role}: found {name!r}; expected the name of a custom "
                        "resource"
                    )
        return self


class ClusterSection(Section):
    """The Ray cluster that a run joins or starts.

    Attributes:
        address: address of a running cluster; "auto" for the cluster of ``RAY_ADDRESS`` or of this
            machine; null to start one for the run. A started cluster listens on loopback only; null
            is refused while ``RAY_ADDRESS`` is set.
        num_cpus: logical CPUs of a started cluster. They only limit placement; the demo's actors
            mostly wait for each other, so the number may exceed the cores.
        placement: nodes of a running cluster on which the processes run.
        temp_dir: folder of a started cluster's files, or null for Ray's default.
        nodes_timeout_s: seconds to wait until a running cluster has the resources that the
            processes request; 0 does not wait.
        call_timeout_s: deadline of every call to a worker, in seconds.
    """

    address: str | None
    num_cpus: PositiveInt
    placement: PlacementSection
    temp_dir: FilePath | None
    nodes_timeout_s: NonNegativeFloat
    call_timeout_s: PositiveFloat


class RandomModel(Section):
    """Qwen3 decoder with random weights and a character tokenizer, built for the run."""

    kind: Literal["random"]
    characters: Annotated[str, Field(min_length=1)]
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_layers: PositiveInt
    num_heads: PositiveInt
    head_dim: Annotated[int, Field(gt=0, multiple_of=2)]
    initializer_range: PositiveFloat


class PretrainedModel(Section):
    """Causal LM and its tokenizer, loaded through transformers.

    Attributes:
        name: folder or hub name.
        use_chat_template: render prompts and follow-ups through the tokenizer's chat template.
    """

    kind: Literal["pretrained"]
    name: Annotated[str, Field(min_length=1)]
    use_chat_template: bool


class LatencySection(Section):
    """Log-normal minimum duration of a response, to simulate a slower generator.

    Attributes:
        median_s: median of the durations, in seconds.
        sigma: standard deviation of their logarithms; 1 gives a long tail.
    """

    median_s: PositiveFloat
    sigma: NonNegativeFloat


class GenerationSection(Section):
    """Generation worker that holds a model and samples from it with transformers.

    ``simulated_latency`` is for benchmarks and tests; null adds nothing.
    """

    backend: Literal["transformers"]
    max_new_tokens: PositiveInt
    temperature: PositiveFloat
    num_gpus: NonNegativeFloat
    num_threads: PositiveInt
    simulated_latency: LatencySection | None


class VllmSection(Section):
    """vLLM servers, and the generation worker in front of them.

    Attributes:
        max_new_tokens: maximum number of tokens of a response.
        temperature: divisor of the logits.
        num_gpus: GPUs of the worker, shared by the servers that it starts.
        addresses: ``http[s]://host[:port]`` of running servers; empty to start servers.
        servers: number of servers to start, on the worker's machine and its loopback; 0 with
            ``addresses``.
        command: command that starts a server, with the Python of vLLM's environment. A relative
            path starts at the working directory of the driver.
        arguments: further options of each started server.
        environment: further variables of each started server.
        start_timeout_s: deadline of the start of all servers, in seconds.
        max_requests_per_server: concurrent requests of a server; further ones queue in the worker.
    """

    backend: Literal["vllm"]
    max_new_tokens: PositiveInt
    temperature: PositiveFloat
    num_gpus: NonNegativeFloat
    addresses: list[str]
    servers: NonNegativeInt
    command: list[str]
    arguments: list[str]
    environment: dict[str, str]
    start_timeout_s: PositiveFloat
    max_requests_per_server: PositiveInt


class OptimizerSection(Section):
    """AdamW with linear warm-up and linear decay to ``final_lr_fraction`` of the rate."""

    learning_rate: NonNegativeFloat
    betas: Betas
    eps: PositiveFloat
    weight_decay: NonNegativeFloat
    max_grad_norm: PositiveFloat
    warmup_steps: NonNegativeInt
    final_lr_fraction: Annotated[float, Field(ge=0, le=1)]


class DynamicBatchingSection(Section):
    """Micro-batches limited by tokens instead of rows; only with ``grpo.mode: sync``."""

    enabled: bool
    max_tokens_per_microbatch: PositiveInt
    sequence_length_round: PositiveInt


class RouterReplaySection(Section):
    """Replay of expert routing, which this trainer does not support; always disabled."""

    enabled: Literal[False]


class PolicySection(Section):
    """Trained model and the data-parallel workers that hold it.

    Attributes:
        data_parallel: number of ranks; each holds the model and the optimizer.
        when_rank_dies: "raise" ends the run; with "proceed" the other ranks take over its samples,
            and the run continues without it. Another death during the takeover ends the run.
    """

    model: Annotated[RandomModel | PretrainedModel, Field(discriminator="kind")]
    data_parallel: PositiveInt
    when_rank_dies: Literal["raise", "proceed"]
    num_gpus_per_worker: NonNegativeFloat
    num_threads: PositiveInt
    max_total_sequence_length: PositiveInt
    make_sequence_length_divisible_by: PositiveInt
    global_batch_size: PositiveInt
    micro_batch_size: PositiveInt
    dynamic_batching: DynamicBatchingSection
    optimizer: OptimizerSection
    generation: Annotated[GenerationSection | VllmSection, Field(discriminator="backend")]
    router_replay: RouterReplaySection


class DynamicSamplingSection(Section):
    """Replacement of groups whose rewards are all equal.

    Attributes:
        enabled: drop and clear such groups.
        max_batches: maximum number of batches of prompts generated for a step. In an asynchronous
            step, the maximum number of cleared samples is instead
            ``(max_batches - 1) * (samples of a step + max_samples_ahead)``.
        when_short: what to do if these batches give too few groups: "raise" ends the run, "proceed"
            trains on the remaining groups, in as many complete optimizer steps as possible. If they
            fill no step, the ranks make one smaller step of complete groups, equally many each, or
            none if that is impossible. An asynchronous step is filled with groups of
            equal rewards, which the loss excludes.
    """

    enabled: bool
    max_batches: PositiveInt
    when_short: Literal["raise", "proceed"]


class AsyncSection(Section):
    """Asynchronous GRPO, for ``grpo.mode: async``; see docs/trainer.md.

    The staleness of a sample is the weight version that it trains minus the version that generated
    the oldest token of its group.

    Attributes:
        max_staleness: maximum staleness of a trained sample. Older groups are cleared and replaced.
        max_samples_ahead: maximum samples in generation or ready, in addition to those of a step;
            null is ``max_staleness`` times the samples of a step, so that few become too stale.
        generators: generation workers, each with a rollout actor.
        min_generators: the run ends if fewer are left.
        replace_lost: start a generator in place of one that died or failed.
        prompts_per_rollout: maximum prompts of one rollout, whose responses start together.
        concurrent_rollouts: rollouts of one generator at the same time.
        prompts_per_claim: prompts whose groups a policy rank claims, and trains on, at once.
        partial_rollouts: install new weights between two tokens of a response, which continues
            with them. If false, install them only between responses. With vLLM, responses always
            continue.
        max_importance_ratio: bound of the importance ratio of a token; see `grpo_loss`.
    """

    max_staleness: NonNegativeInt
    max_samples_ahead: NonNegativeInt | None
    generators: PositiveInt
    min_generators: PositiveInt
    replace_lost: bool
    prompts_per_rollout: PositiveInt
    concurrent_rollouts: PositiveInt
    prompts_per_claim: PositiveInt
    partial_rollouts: bool
    max_importance_ratio: PositiveFloat


class GRPOSection(Section):
    """Settings of GRPO.

    The algorithm is that of Shao et al. 2024, arXiv:2402.03300, with the clipping and sampling of
    Yu et al. 2025, arXiv:2503.14476.

    Attributes:
        mode: "sync" alternates generation and training; with "async" generators run ahead.
        num_steps: steps of the run.
        num_prompts_per_step: prompts of a batch.
        num_generations_per_prompt: group size.
        max_rollout_turns: maximum number of responses per conversation.
        normalize_advantages: divide by the group's standard deviation.
        reward_scale: factor on the rewards that advantages are computed from; reports show the
            unscaled reward.
        clip_low: the ratio is clipped below ``1 - clip_low``.
        clip_high: the ratio is clipped above ``1 + clip_high``.
        kl_coefficient: weight of the KL term to the initial policy; 0 skips the reference stage.
        recompute_prev_logprobs: score the batch with the policy before training; else the
            generator's log-probabilities are used. In an asynchronous run, true clips the update
            relative to the policy before the optimizer step, and weights each token by its
            importance ratio (decoupled PPO, arXiv:2110.00641). False clips it relative to the
            policy that generated the samples, without weights.
        max_logprob_error: exclude samples whose mean absolute difference between the policy's and
            the generator's log-probabilities is larger or not finite; null excludes none. Needs
            ``recompute_prev_logprobs``.
        overlong_filtering: exclude truncated samples from the loss. A sample is truncated if one
            of its responses reached the token budget.
        statistics_include_filtered: whether samples excluded by their ``loss_multiplier`` or by
            ``overlong_filtering`` count in the baseline and spread of their group, and so in
            dynamic sampling. Samples that ``max_logprob_error`` excludes always count, because they
            are known only after the baselines are computed.
        deduplicate_multimodal_data: always false; this trainer has no multimodal models.
    """

    mode: Literal["sync", "async"]
    num_steps: PositiveInt
    num_prompts_per_step: PositiveInt
    num_generations_per_prompt: Annotated[int, Field(ge=2)]
    max_rollout_turns: PositiveInt
    normalize_advantages: bool
    reward_scale: PositiveFloat
    clip_low: PositiveFloat
    clip_high: PositiveFloat
    kl_coefficient: NonNegativeFloat
    recompute_prev_logprobs: bool
    max_logprob_error: PositiveFloat | None
    overlong_filtering: bool
    statistics_include_filtered: bool
    dynamic_sampling: DynamicSamplingSection
    asynchronous: AsyncSection
    deduplicate_multimodal_data: Literal[False]


class DataSection(Section):
    """JSONL files of prompts; null uses those shipped with the service."""

    train: FilePath | None
    validation: FilePath | None
    shuffle: bool


class EnvSection(Section):
    """Environment that verifies answers.

    Attributes:
        should_use_nemo_gym: always false; this trainer does not support that environment.
        step_timeout_s: deadline of one environment step, in seconds.
        correct: text before a follow-up to a correct answer.
        wrong: text before a follow-up to a wrong answer.
    """

    should_use_nemo_gym: Literal[False]
    step_timeout_s: PositiveFloat
    correct: str
    wrong: str


class ValidationSection(Section):
    """Validation on held-out prompts, one conversation each; ``every_steps: 0`` disables it."""

    every_steps: NonNegativeInt
    batch_size: PositiveInt


class TracingSection(Section):
    """Spans, lifecycle events and metrics of every process of the run; see docs/telemetry.md.

    Attributes:
        enabled: export them, and observe the data plane regardless of
            ``data_plane.observability``.
        endpoint: base URL of an OTLP/HTTP collector, or null to use the ``OTEL_*`` variables of
            each process.
        verbose: also record micro-batches, requests to the storage, conversions of message logs,
            and all phases of a refit.
        sample_texts: samples of each step whose conversation and tokens are recorded; 0 for none.
            ``grpo.mode: async`` then also writes "prev_logprobs".
    """

    enabled: bool
    endpoint: str | None
    verbose: bool
    sample_texts: NonNegativeInt


class TrackingSection(Section):
    """Experiment trackers that receive the configuration and the metrics of each step.

    Attributes:
        sinks: any of "mlflow", "wandb" and "tensorboard", each with the extra of its name; see
            docs/trainer.md. A resumed run continues its record in each.
    """

    sinks: list[Literal["mlflow", "wandb", "tensorboard"]]


class ControlAccessSection(Section):
    """TLS and token for connections to a refit server.

    Each process reads the files and the variable on its own machine.

    Attributes:
        tls_ca: PEM file of the trusted certificates, or null for connections without TLS.
        tls_name: expected name in the server's certificate, or null for the host of its address.
        token_file: file with the token, or null.
        token_env: name of the environment variable with the token, or null. Every process of Ray
            needs it: set it for the driver if the run starts Ray, else for ``ray start``.
    """

    tls_ca: FilePath | None
    tls_name: str | None
    token_file: FilePath | None
    token_env: str | None


class RefitSection(Section):
    """Transfer of new weights to the generation worker; see docs/refit-mx.md.

    Attributes:
        control: address of a refit server, host:port, or null for a control plane in the driver.
        control_access: access to that server; all null for a server without TLS and token.
        host: address on which the driver's control plane and the policy workers listen; "node" for
            the address of each process's machine.
        advertised_host: address that the control plane and the policy workers advertise; "node" for
            the address of each process's machine; null for ``host``, or for "node" if ``host``
            means all interfaces.
        transport: how the bytes move; "shm" is memory that both processes map, on one machine.
            "auto" uses "shm" if the generation worker and all policy workers share a machine, else
            NIXL if it is installed, else TCP.
        generation_tensor_parallel: shards from which the generation worker assembles its weights;
            1 with vLLM, whose servers have options for that.
        timeout_s: deadline of a publish and of a refit, in seconds; also how long to wait for a
            refit server that is down.
    """

    control: str | None
    control_access: ControlAccessSection
    host: Annotated[str, Field(min_length=1)]
    advertised_host: Annotated[str, Field(min_length=1)] | None
    transport: Literal["auto", "nixl", "shm", "tcp"]
    generation_tensor_parallel: PositiveInt
    timeout_s: PositiveFloat

    @model_validator(mode="after")
    def _access_fits(self) -> RefitSection:
        access = self.control_access
        if self.control is None and any(access.model_dump().values()):
            raise ValueError("refit.control_access: set, while refit.control is null")
        if access.token_file is not None and access.token_env is not None:
            raise ValueError(
                "refit.control_access: token_file and token_env are both set; expected one of them"
            )
        if access.tls_name is not None and access.tls_ca is None:
            raise ValueError("refit.control_access: tls_name is set without tls_ca; expected both")
        return self


class CheckpointSection(Section):
    """Checkpoints of the run.

    Attributes:
        every_steps: steps between two checkpoints; 0 writes none.
        keep_last: number of newest checkpoints to retain.
        journal: store the responses of an asynchronous run until a checkpoint has trained them. A
            resume after a crash then uses the finished groups. It continues responses in progress,
            unless vLLM generates or ``partial_rollouts`` is false.
    """

    every_steps: NonNegativeInt
    journal: bool
    keep_last: PositiveInt
