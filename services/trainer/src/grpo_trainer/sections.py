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
# YAML has no paths and no tuples: these two take text and lists in spite of the strict sections.
FilePath = Annotated[Path, Field(strict=False)]
Betas = Annotated[tuple[Fraction, Fraction], Field(strict=False)]


class Section(BaseModel):
    """A mapping of the YAML; unknown keys are refused, and "3" or true is no number."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class RunSection(Section):
    """Where a run writes, and the seed that all of its randomness follows from.

    Attributes:
        name: names a folder below ``output``.
        output: folder of all runs.
        seed: of the prompts' order, of a random model and of sampling.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$")]
    output: FilePath
    seed: NonNegativeInt


CustomResources = dict[str, PositiveFloat]
_NOT_CUSTOM = ("", "CPU", "GPU", "memory", "object_store_memory")


class PlacementSection(Section):
    """Custom Ray resources and how much of each a process asks for, so that it is placed on a node
    that has them; none for any node. Storage units: ``data_plane.unit_resources``.

    Attributes:
        policy: of each policy worker.
        generation: of the generation worker.
        rollout: of the rollout actor.
        environment: of the environment.
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
    """How Ray is reached or started.

    Attributes:
        address: address of a running cluster; "auto" for the one of ``RAY_ADDRESS`` or of this
            machine; null to start one for the run, which listens on loopback alone, and is refused
            while ``RAY_ADDRESS`` is set.
        num_cpus: logical CPUs of a started cluster. They only bound placement; the demo's actors
            mostly wait for each other, so there may be more than cores.
        placement: which nodes of a running cluster the processes go to.
        temp_dir: folder of a started cluster's files, or null for Ray's own choice.
        nodes_timeout_s: how long nodes of a running cluster may take to join until it has what the
            processes ask for, in seconds; 0 not to wait.
        call_timeout_s: deadline of every call to a worker, in seconds.
    """

    address: str | None
    num_cpus: PositiveInt
    placement: PlacementSection
    temp_dir: FilePath | None
    nodes_timeout_s: NonNegativeFloat
    call_timeout_s: PositiveFloat


class RandomModel(Section):
    """A Qwen3 decoder with random weights and a character tokenizer, built for the run."""

    kind: Literal["random"]
    characters: Annotated[str, Field(min_length=1)]
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_layers: PositiveInt
    num_heads: PositiveInt
    head_dim: Annotated[int, Field(gt=0, multiple_of=2)]
    initializer_range: PositiveFloat


class PretrainedModel(Section):
    """A causal LM and its tokenizer, loaded through transformers.

    Attributes:
        name: folder or hub name.
        use_chat_template: render prompts and follow-ups through the tokenizer's chat template.
    """

    kind: Literal["pretrained"]
    name: Annotated[str, Field(min_length=1)]
    use_chat_template: bool


class GenerationSection(Section):
    """The generation worker."""

    backend: Literal["transformers"]
    max_new_tokens: PositiveInt
    temperature: PositiveFloat
    num_gpus: NonNegativeFloat
    num_threads: PositiveInt


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
    """Micro-batches cut by tokens instead of rows."""

    enabled: bool
    max_tokens_per_microbatch: PositiveInt
    sequence_length_round: PositiveInt


class RouterReplaySection(Section):
    """Replay of expert routing; not used by dense models."""

    enabled: Literal[False]


class PolicySection(Section):
    """The trained model and the data-parallel workers that hold it."""

    model: Annotated[RandomModel | PretrainedModel, Field(discriminator="kind")]
    data_parallel: PositiveInt
    num_gpus_per_worker: NonNegativeFloat
    num_threads: PositiveInt
    max_total_sequence_length: PositiveInt
    make_sequence_length_divisible_by: PositiveInt
    global_batch_size: PositiveInt
    micro_batch_size: PositiveInt
    dynamic_batching: DynamicBatchingSection
    optimizer: OptimizerSection
    generation: GenerationSection
    router_replay: RouterReplaySection


class DynamicSamplingSection(Section):
    """Replace groups whose rewards are all the same.

    Attributes:
        enabled: drop and clear such groups.
        max_batches: generate at most so many batches of prompts for a step.
        when_short: with too few groups left after that, end the run or train on what there is: as
            many whole optimiser steps as it makes, or a smaller one if it makes none; on nothing
            where not even that is made of whole groups in equal parts for the ranks.
    """

    enabled: bool
    max_batches: PositiveInt
    when_short: Literal["raise", "proceed"]


class GRPOSection(Section):
    """The algorithm (Shao et al. 2024, arXiv:2402.03300; clipping and sampling of Yu et al. 2025,
    arXiv:2503.14476).

    Attributes:
        num_steps: optimiser rounds of the run.
        num_prompts_per_step: prompts of a batch.
        num_generations_per_prompt: group size.
        max_rollout_turns: responses per conversation at most.
        normalize_advantages: divide by the group's standard deviation.
        reward_scale: factor on every reward that advantages are computed from; what is reported is
            the reward itself.
        clip_low: the ratio is clipped below ``1 - clip_low``.
        clip_high: the ratio is clipped above ``1 + clip_high``.
        kl_coefficient: weight of the KL term to the initial policy; at 0 the reference stage is
            skipped.
        recompute_prev_logprobs: score the batch by the policy before training; else the
            generator's log-probabilities stand in for them.
        max_logprob_error: leave samples out whose mean absolute difference between the two is
            larger or no number, or null. Needs ``recompute_prev_logprobs``.
        overlong_filtering: leave truncated samples out of the loss: those with a response that ran
            into its token budget.
        statistics_include_filtered: whether samples that are left out of the loss, by their
            ``loss_multiplier`` or by ``overlong_filtering``, count in the baseline and spread of
            their group, and so in dynamic sampling. Those that ``max_logprob_error`` leaves out
            always count: they are known only afterwards.
        deduplicate_multimodal_data: for multimodal models.
    """

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
    deduplicate_multimodal_data: Literal[False]


class DataSection(Section):
    """Prompts, JSONL. Null takes the ones shipped with the service."""

    train: FilePath | None
    validation: FilePath | None
    shuffle: bool


class EnvSection(Section):
    """The environment that verifies answers.

    Attributes:
        should_use_nemo_gym: always false; that environment is not part of this trainer.
        step_timeout_s: deadline of one environment step, in seconds.
        correct: what the environment says before a follow-up to a right answer.
        wrong: the same for a wrong answer.
    """

    should_use_nemo_gym: Literal[False]
    step_timeout_s: PositiveFloat
    correct: str
    wrong: str


class ValidationSection(Section):
    """A pass over held-out prompts, one conversation each; ``every_steps: 0`` makes none."""

    every_steps: NonNegativeInt
    batch_size: PositiveInt


class TracingSection(Section):
    """Spans, lifecycle events and metrics of every process of the run; see docs/telemetry.md.

    Attributes:
        enabled: send them, and observe the data plane whatever ``data_plane.observability`` says.
        endpoint: base URL of an OTLP/HTTP collector, or null for what the ``OTEL_*`` variables of
            each process say.
        verbose: a span for each micro-batch as well.
    """

    enabled: bool
    endpoint: str | None
    verbose: bool


class ControlAccessSection(Section):
    """What the processes of a run trust and bring when they speak to a refit server.

    Each process reads the files and the variable on its own machine.

    Attributes:
        tls_ca: PEM file of the certificates to trust, or null to speak without TLS.
        tls_name: that the server's certificate has to be of, or null for the host of its address.
        token_file: file with the token, or null.
        token_env: name of the environment variable with the token, or null.
    """

    tls_ca: FilePath | None
    tls_name: str | None
    token_file: FilePath | None
    token_env: str | None


class RefitSection(Section):
    """How new weights reach the generation worker; see docs/refit-mx.md.

    Attributes:
        control: address of a refit server, host:port, or null for a control plane in the driver.
        control_access: of that server; all null for one without TLS and token.
        host: on which the driver's control plane and the policy workers listen; "node" for the
            address of each one's machine.
        advertised_host: that they tell each other; null for ``host``, or for the address of each
            one's machine where that is all interfaces; "node" for that address always.
        transport: how the bytes move; "shm" is memory that both processes map, on one machine.
            "auto" takes "shm" where the generation worker is on the machine of all policy workers,
            else NIXL where it is installed, else TCP.
        generation_tensor_parallel: shards that the generation worker assembles its weights from.
        timeout_s: deadline of a publish and of a refit, in seconds. A refit server that is away is
            waited for as long.
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
    """Checkpoints of the whole run; ``every_steps: 0`` writes none."""

    every_steps: NonNegativeInt
    keep_last: PositiveInt
