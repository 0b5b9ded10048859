"""The trainer's configuration: YAML, checked by pydantic, every key explicit.

The models have no defaults: the YAML states everything that a run does. Keys that the rollout actor
and the data plane read have the names that those packages document.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any  # Any: YAML before it is checked

import yaml
from pydantic import ValidationError, model_validator

from dataplane_core import ConfigError, DataPlaneConfig, validate_config
from grpo_trainer.config.sections import (
    MIN_RESOURCE,
    CheckpointSection,
    ClusterSection,
    DataSection,
    EnvSection,
    GRPOSection,
    PolicySection,
    RefitSection,
    RunSection,
    Section,
    TracingSection,
    TrackingSection,
    ValidationSection,
    VllmSection,
)
from grpo_trainer.config.vllm_problems import vllm_problems
from grpo_trainer.errors import ConfigurationError


class TrainerConfig(Section):
    """Configuration of a run."""

    run: RunSection
    cluster: ClusterSection
    policy: PolicySection
    grpo: GRPOSection
    data: DataSection
    env: EnvSection
    validation: ValidationSection
    checkpointing: CheckpointSection
    tracing: TracingSection
    tracking: TrackingSection
    refit: RefitSection
    data_plane: DataPlaneConfig

    @property
    def samples_per_step(self) -> int:
        """Samples of one full batch."""
        return self.grpo.num_prompts_per_step * self.grpo.num_generations_per_prompt

    @property
    def max_samples_in_store(self) -> int:
        """Maximum samples of an asynchronous run in generation, ready, or in training at a time."""
        section = self.grpo.asynchronous
        ahead = section.max_samples_ahead
        if ahead is None:
            ahead = section.max_staleness * self.samples_per_step
        return self.samples_per_step + ahead

    @model_validator(mode="after")
    def _parts_fit(self) -> TrainerConfig:
        problems = [*_step_problems(self), *_async_problems(self), *_data_plane_problems(self)]
        if isinstance(generation := self.policy.generation, VllmSection):
            problems += vllm_problems(
                generation, refit=self.refit, call_timeout_s=self.cluster.call_timeout_s
            )
        if problems:
            raise ValueError("; ".join(problems))
        return self


def _step_problems(config: TrainerConfig) -> list[str]:
    policy, samples = config.policy, config.samples_per_step
    batching, longest = policy.dynamic_batching, policy.max_total_sequence_length
    problems = [
        f"{key}: found {amount:g}; expected 0, a fraction of {MIN_RESOURCE:g} or more, or an "
        "integer; Ray assigns no other amounts of GPUs"
        for key, amount in (
            ("policy.num_gpus_per_worker", policy.num_gpus_per_worker),
            ("policy.generation.num_gpus", policy.generation.num_gpus),
        )
        if 0 < amount < MIN_RESOURCE or (amount > 1 and not amount.is_integer())
    ]
    if samples % policy.global_batch_size:
        problems.append(
            f"policy.global_batch_size: {policy.global_batch_size} does not divide the {samples} "
            "samples of a step (grpo.num_prompts_per_step x grpo.num_generations_per_prompt)"
        )
    if policy.global_batch_size % policy.data_parallel:
        problems.append(
            f"policy.data_parallel: {policy.data_parallel} does not divide "
            f"policy.global_batch_size {policy.global_batch_size}"
        )
    if policy.generation.max_new_tokens >= longest:
        problems.append(
            f"policy.generation.max_new_tokens: {policy.generation.max_new_tokens} leaves no token "
            f"for a prompt in policy.max_total_sequence_length {longest}"
        )
    round_to = batching.sequence_length_round
    widest = -(-longest // round_to) * round_to
    if batching.enabled and batching.max_tokens_per_microbatch < widest:
        problems.append(
            "policy.dynamic_batching.max_tokens_per_microbatch: "
            f"{batching.max_tokens_per_microbatch} does not hold a sequence of {widest} tokens "
            "(policy.max_total_sequence_length, rounded up)"
        )
    grpo = config.grpo
    if grpo.max_logprob_error is not None and not grpo.recompute_prev_logprobs:
        problems.append(
            f"grpo.max_logprob_error: found {grpo.max_logprob_error}; expected null with "
            "grpo.recompute_prev_logprobs false: without recomputed log-probabilities there is "
            "nothing to compare the generator's with"
        )
    return problems


def _async_problems(config: TrainerConfig) -> list[str]:
    grpo, policy = config.grpo, config.policy
    if grpo.mode == "sync":
        if config.checkpointing.journal:
            return ["checkpointing.journal: found True; expected False with grpo.mode sync"]
        return []
    problems = []
    part = policy.data_parallel * grpo.num_generations_per_prompt
    if policy.global_batch_size % part:
        problems.append(
            f"policy.global_batch_size: {policy.global_batch_size} with grpo.mode async; expected "
            f"a multiple of {part} (policy.data_parallel x grpo.num_generations_per_prompt), as "
            "ranks claim complete groups"
        )
    if policy.dynamic_batching.enabled:
        problems.append(
            "policy.dynamic_batching.enabled: found True; expected False with grpo.mode async, "
            "whose ranks train claims in micro-batches of policy.micro_batch_size"
        )
    if grpo.max_logprob_error is not None:
        problems.append(
            f"grpo.max_logprob_error: found {grpo.max_logprob_error}; expected null with "
            "grpo.mode async, where grpo.asynchronous.max_importance_ratio bounds the difference"
        )
    section = grpo.asynchronous
    if section.min_generators > section.generators:
        problems.append(
            f"grpo.asynchronous.min_generators: {section.min_generators} is more than the "
            f"{section.generators} generators"
        )
    if isinstance(policy.generation, VllmSection) and section.generators > 1:
        problems.append(
            f"grpo.asynchronous.generators: {section.generators} with vLLM; expected 1, which uses "
            "all of policy.generation.servers or addresses"
        )
    if config.data_plane.get("claim_lease_s") is None:
        problems.append(
            "data_plane.claim_lease_s: missing; grpo.mode async needs it, so that the groups of "
            "a dead generator are claimed again"
        )
    if config.checkpointing.journal and config.checkpointing.every_steps == 0:
        problems.append(
            "checkpointing.journal: found True with checkpointing.every_steps 0; expected "
            "checkpoints, which bound the journal"
        )
    return problems


def _data_plane_problems(config: TrainerConfig) -> list[str]:
    plane = config.data_plane
    problems = [
        f"data_plane.{key}: missing; every key must be set"
        for key in REQUIRED_DATA_PLANE_KEYS
        if key not in plane
    ]
    try:
        validate_config(plane)
    except ConfigError as error:
        problems.append(str(error).replace("data-plane config: ", "data_plane."))
    if not plane["enabled"]:
        problems.append("data_plane.enabled: found False; the trainer needs its data plane")
    if plane["impl"] == "in_memory":
        problems.append(
            "data_plane.impl: 'in_memory' is visible to one process; the trainer has several"
        )
    if plane.get("backend") == "yuanrong" and config.refit.transport not in ("shm", "tcp"):
        problems.append(
            f"refit.transport: found {config.refit.transport!r}; expected 'shm' or 'tcp' "
            "with data_plane.backend 'yuanrong', which cannot share a process with NIXL"
        )
    # With dynamic sampling a batch can arrive while all but one group of a step are stored.
    sampling = config.grpo.dynamic_sampling
    batches = 2 if sampling.enabled and sampling.max_batches > 1 else 1
    needed = max(config.samples_per_step * batches, config.validation.batch_size)
    if config.grpo.mode == "async":
        needed = config.max_samples_in_store + config.validation.batch_size
    capacity = plane.get("storage_capacity", needed)
    if capacity < needed:
        problems.append(
            f"data_plane.storage_capacity: {capacity} is less than the {needed} samples that it "
            "must hold at once"
        )
    return problems


REQUIRED_DATA_PLANE_KEYS = (
    "backend",
    "storage_capacity",
    "num_storage_units",
    "claim_meta_poll_interval_s",
    "global_segment_size",
    "local_buffer_size",
    "ack_timeout_ms",
    "claim_lease_s",
    "unit_resources",
    "observability",
)

DEMO_CONFIG = Path(__file__).with_name("demo.yaml")


class _Loader(yaml.SafeLoader):
    """YAML loader that reads ``1e-3`` as a number, as in YAML 1.2."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)


def load_config(path: Path = DEMO_CONFIG, overrides: Sequence[str] = ()) -> TrainerConfig:
    """Read a configuration.

    Args:
        path: YAML file; by default the shipped demo.
        overrides: ``dotted.key=value`` each, value in YAML; the file must have the key, or it is
            an optional key of the data plane.

    Raises:
        ConfigurationError: naming the file and every invalid override, unknown key, missing key
            and invalid value.
    """
    try:
        raw = _parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"{path}: not valid YAML: {' '.join(str(error).split())}"
        ) from None
    if not isinstance(raw, dict):
        raise ConfigurationError(f"{path}: found {type(raw).__name__}; expected a mapping")
    problems = []
    for override in overrides:
        try:
            apply_override(raw, override)
        except ConfigurationError as error:
            problems.append(str(error))
    try:
        config = check_config(raw, source=str(path))
    except ConfigurationError as error:
        problems.append(str(error))
    if problems:
        raise ConfigurationError("; ".join(problems))
    return config


def check_config(raw: Mapping[str, Any], *, source: str) -> TrainerConfig:
    """Validate a parsed configuration; raise as `load_config`."""
    try:
        return TrainerConfig.model_validate(raw)
    except ValidationError as error:
        problems = "; ".join(_describe(item) for item in error.errors(include_url=False))
        raise ConfigurationError(f"{source}: {problems}") from None


def _describe(item: Any) -> str:
    parts = [str(part) for part in item["loc"]]
    if parts[:2] in (["policy", "model"], ["policy", "generation"]):
        del parts[2:3]  # the kind of model or the backend, which pydantic adds to the path
    location = ".".join(parts)
    if item["type"] == "extra_forbidden":
        close = difflib.get_close_matches(parts[-1], _known_keys(), n=1)
        return f"{location}: unknown key" + (f"; did you mean {close[0]!r}?" if close else "")
    if item["type"] == "missing":
        return f"{location}: missing; every key must be set"
    if item["type"] == "union_tag_not_found":
        return f"{location}.{_discriminator(item)}: missing; every key must be set"
    if item["type"] == "union_tag_invalid":
        expected, tag = item["ctx"]["expected_tags"], item["ctx"]["tag"]
        return f"{location}.{_discriminator(item)}: found {tag!r}; expected {expected}"
    if item["type"] == "value_error":
        return str(item["ctx"]["error"])
    return f"{location}: found {item['input']!r}; {item['msg']}"


def _discriminator(item: Any) -> str:
    return str(item["ctx"]["discriminator"]).strip("'")


def _known_keys() -> list[str]:
    names = [*DataPlaneConfig.__annotations__]
    for section in Section.__subclasses__():
        names.extend(section.model_fields)
    return names


def apply_override(raw: dict[str, Any], override: str) -> None:
    """Apply ``dotted.key=value`` to ``raw``; raise ConfigurationError if it does not fit."""
    key, separator, value = override.partition("=")
    if not separator:
        raise ConfigurationError(f"--set {override}: expected dotted.key=value")
    node: Any = raw
    *parents, leaf = key.split(".")
    for parent in parents:
        node = node.get(parent) if isinstance(node, dict) else None
    optional = parents == ["data_plane"] and leaf in DataPlaneConfig.__annotations__
    if not isinstance(node, dict) or not (leaf in node or optional):
        raise ConfigurationError(f"--set {override}: the configuration has no key {key!r}")
    try:
        node[leaf] = _parse(value)
    except yaml.YAMLError:
        raise ConfigurationError(f"--set {override}: {value!r} is not valid YAML") from None


def _parse(text: str) -> Any:
    return yaml.load(text, Loader=_Loader)  # noqa: S506  # a SafeLoader
