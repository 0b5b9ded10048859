"""`RolloutSettings`: a rollout's part of the trainer's configuration.

`MasterConfig` and the sections in it only describe the keys, for a JSON schema. The rest of the
configuration belongs to others, so further keys are allowed in all of them but `MediaForm`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar  # Any: a configuration from YAML

import torch

from dataplane_core import ConfigError, UnsupportedError
from dataplane_core.arguments import MAX_SECONDS
from rollout_actor.media import NOT_MEDIA, RESERVED_NAMES, MediaForms

DEFAULT_STEP_TIMEOUT_S = 300.0
"""Default of ``env.step_timeout_s``: how long an environment's step may take, in seconds."""


@dataclass(frozen=True, kw_only=True)
class GenerationSection:
    """Section ``policy.generation``.

    Attributes:
        max_new_tokens: maximum tokens of a response.
        async_engine: generate row by row through ``generate_async``. It may also be in the
            backend's section here, such as ``vllm_cfg``.
    """

    max_new_tokens: int | None = None
    async_engine: bool | None = None


@dataclass(frozen=True, kw_only=True)
class RouterReplaySection:
    """Section ``policy.router_replay``.

    Attributes:
        enabled: put ``routed_experts``.
    """

    enabled: bool | None = None


@dataclass(frozen=True, kw_only=True)
class MediaForm:
    """Form of a media tensor that is declared before its first row.

    Attributes:
        dtype: dtype of torch, such as float32.
        dims: number of dimensions of a row's tensor.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    dtype: str
    dims: int


@dataclass(frozen=True, kw_only=True)
class PolicySection:
    """Section ``policy``.

    Attributes:
        max_total_sequence_length: maximum tokens of a conversation.
        make_sequence_length_divisible_by: alignment of the sequence width, in tokens.
        generation: how responses are generated.
        router_replay: routed experts of mixture-of-experts models.
        media: name of media to the form of a row's tensor.
    """

    max_total_sequence_length: int
    make_sequence_length_divisible_by: int
    generation: GenerationSection | None = None
    router_replay: RouterReplaySection | None = None
    media: dict[str, MediaForm] | None = None


@dataclass(frozen=True, kw_only=True)
class GrpoSection:
    """Section ``grpo``.

    Attributes:
        max_rollout_turns: maximum responses per row.
        deduplicate_multimodal_data: rows of a group share equal media in memory.
    """

    max_rollout_turns: int
    deduplicate_multimodal_data: bool | None = None


@dataclass(frozen=True, kw_only=True)
class EnvSection:
    """Section ``env``.

    Attributes:
        step_timeout_s: how long an environment's step may take, in seconds.
        should_use_nemo_gym: true is refused.
    """

    step_timeout_s: float | None = DEFAULT_STEP_TIMEOUT_S
    should_use_nemo_gym: bool | None = None


@dataclass(frozen=True, kw_only=True)
class MasterConfig:
    """Keys of the trainer's configuration that a rollout reads.

    Attributes:
        policy: lengths, generation and media.
        grpo: turns and groups.
        env: environments.
    """

    policy: PolicySection
    grpo: GrpoSection
    env: EnvSection | None = None


@dataclass(frozen=True, kw_only=True)
class RolloutSettings:
    """The settings of a rollout.

    Attributes:
        max_seq_len: maximum tokens of a conversation; ``policy.max_total_sequence_length``.
        pad_to_multiple: alignment of the sequence width, in tokens;
            ``policy.make_sequence_length_divisible_by``.
        max_new_tokens: maximum tokens of a response; ``policy.generation.max_new_tokens``, None if
            absent.
        max_turns: maximum responses per row; ``grpo.max_rollout_turns``.
        async_generation: generate row by row through ``generate_async``; ``async_engine`` in
            ``policy.generation`` or in the backend's section there (``vllm_cfg`` for vllm).
        router_replay: put ``routed_experts``; ``policy.router_replay.enabled``, default off.
        share_group_media: rows of a group share equal media in memory;
            ``grpo.deduplicate_multimodal_data``, default off.
        step_timeout_s: how long an environment's step may take; ``env.step_timeout_s``.
        media: name of media to the empty tensor that a row without items gets; ``policy.media``,
            where each name has a ``dtype`` and the ``dims`` of a row's tensor.
    """

    max_seq_len: int
    pad_to_multiple: int
    max_new_tokens: int | None
    max_turns: int
    async_generation: bool
    router_replay: bool
    share_group_media: bool
    step_timeout_s: float
    media: MediaForms

    @classmethod
    def from_master_config(cls, master_config: Any) -> RolloutSettings:
        """Read the settings from nested mappings, or a pydantic model of them."""
        config = _Section("", _as_mapping(master_config))
        policy, grpo, env = config.section("policy"), config.section("grpo"), config.section("env")
        if env.flag("should_use_nemo_gym"):
            raise UnsupportedError(
                "master_config: env.should_use_nemo_gym is true, but this rollout does not support "
                "NeMo-Gym; set it to false and pass the environments as task_to_env"
            )
        generation = policy.section("generation")
        return cls(
            max_seq_len=policy.positive_int("max_total_sequence_length"),
            pad_to_multiple=policy.positive_int("make_sequence_length_divisible_by"),
            max_new_tokens=generation.optional_positive_int("max_new_tokens"),
            max_turns=grpo.positive_int("max_rollout_turns"),
            async_generation=_is_async(generation),
            router_replay=policy.section("router_replay").flag("enabled"),
            share_group_media=grpo.flag("deduplicate_multimodal_data"),
            step_timeout_s=env.positive_seconds("step_timeout_s", DEFAULT_STEP_TIMEOUT_S),
            media=_declared_media(policy.section("media")),
        )


def _is_async(generation: _Section) -> bool:
    engine = generation.section(f"{generation.get('backend', 'vllm')}_cfg")
    return generation.flag("async_engine") or engine.flag("async_engine")


def _declared_media(media: _Section) -> MediaForms:
    forms: MediaForms = {}
    for name in media.names():
        section = media.section(name)
        unknown = section.names() - {"dtype", "dims"}
        if name in NOT_MEDIA | RESERVED_NAMES or unknown:
            problem = (
                f"unknown key {sorted(unknown)[0]!r}" if unknown else "the name of another column"
            )
            raise ConfigError(
                f"master_config: policy.media.{name}: {problem}; expected the name of a media "
                "tensor, with the keys dtype and dims"
            )
        dtype = getattr(torch, str(section.get("dtype", "")).removeprefix("torch."), None)
        if not isinstance(dtype, torch.dtype):
            raise ConfigError(
                f"master_config: policy.media.{name}.dtype: found {section.get('dtype', None)!r}; "
                "expected a dtype of torch, such as float32"
            )
        forms[name] = torch.empty((0,) * section.positive_int("dims"), dtype=dtype)
    return forms


def _as_mapping(section: Any) -> Mapping[str, Any]:
    if hasattr(section, "model_dump"):
        section = section.model_dump()
    if not isinstance(section, Mapping):
        raise ConfigError(f"master_config: found {type(section).__name__}; expected a mapping")
    return section


class _Section:
    """A section of the configuration with its path. A key that is None counts as absent."""

    def __init__(self, path: str, values: Mapping[str, Any]) -> None:
        self._path = path
        self._values = values

    def names(self) -> set[str]:
        return set(map(str, self._values))

    def get(self, key: str, default: Any) -> Any:
        value = self._values.get(key)
        return default if value is None else value

    def _unexpected(self, key: str, expected: str) -> ConfigError:
        value = self._values[key]
        return ConfigError(
            f"master_config: {self._path}{key}: found {value!r}; expected {expected}"
        )

    def section(self, key: str) -> _Section:
        values = self.get(key, {})
        if not isinstance(values, Mapping):
            raise self._unexpected(key, "a mapping")
        return _Section(f"{self._path}{key}.", values)

    def flag(self, key: str) -> bool:
        value = self.get(key, False)
        if not isinstance(value, bool):
            raise self._unexpected(key, "true or false")
        return value

    def positive_int(self, key: str) -> int:
        value = self.get(key, None)
        if value is None:
            raise ConfigError(f"master_config: {self._path}{key} is missing; expected an int")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self._unexpected(key, "an int of at least 1")
        return value

    def optional_positive_int(self, key: str) -> int | None:
        return None if self.get(key, None) is None else self.positive_int(key)

    def positive_seconds(self, key: str, default: float) -> float:
        value = self.get(key, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value <= MAX_SECONDS:
            raise self._unexpected(key, f"seconds above 0, at most {MAX_SECONDS:g}")
        return float(value)
