"""What a rollout reads of the trainer's configuration, checked once at construction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any  # Any: a configuration from YAML

from dataplane_core import ConfigError, UnsupportedError

DEFAULT_STEP_TIMEOUT_S = 300.0
"""How long an environment's step may take, in seconds, if ``env.step_timeout_s`` does not say."""

_MISSING = object()


@dataclass(frozen=True, kw_only=True)
class RolloutSettings:
    """The settings of a rollout.

    Attributes:
        max_seq_len: tokens of a conversation at most; ``policy.max_total_sequence_length``.
        pad_to_multiple: alignment of the sequence width, in tokens;
            ``policy.make_sequence_length_divisible_by``.
        max_new_tokens: tokens of a response at most; ``policy.generation.max_new_tokens``, None if
            absent.
        max_turns: responses per row at most; ``grpo.max_rollout_turns``.
        async_generation: generate row by row through ``generate_async``; ``async_engine`` in
            ``policy.generation`` or in the back end's own section there (``vllm_cfg`` for vllm).
        router_replay: put ``routed_experts``; ``policy.router_replay.enabled``, off if absent.
        share_group_media: rows of a group share equal media in memory;
            ``grpo.deduplicate_multimodal_data``, off if absent.
        step_timeout_s: how long an environment's step may take; ``env.step_timeout_s``.
    """

    max_seq_len: int
    pad_to_multiple: int
    max_new_tokens: int | None
    max_turns: int
    async_generation: bool
    router_replay: bool
    share_group_media: bool
    step_timeout_s: float

    @classmethod
    def from_master_config(cls, master_config: Any) -> RolloutSettings:
        """Read the settings from nested mappings, or a pydantic model of them.

        Raises:
            ConfigError: (a ValueError) naming the key that is missing or out of range.
            UnsupportedError: (a NotImplementedError) if ``env.should_use_nemo_gym`` is on.
        """
        config = _Section("", _as_mapping(master_config))
        policy, grpo, env = config.section("policy"), config.section("grpo"), config.section("env")
        if env.flag("should_use_nemo_gym"):
            raise UnsupportedError(
                "master_config: env.should_use_nemo_gym is true, and this rollout has no NeMo-Gym "
                "path; set it to false and give the environments as task_to_env"
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
        )


def _is_async(generation: _Section) -> bool:
    engine = generation.section(f"{generation.get('backend', 'vllm')}_cfg")
    return generation.flag("async_engine") or engine.flag("async_engine")


def _as_mapping(section: Any) -> Mapping[str, Any]:
    if hasattr(section, "model_dump"):
        section = section.model_dump()
    if not isinstance(section, Mapping):
        raise ConfigError(f"master_config: found {type(section).__name__}; expected a mapping")
    return section


class _Section:
    """A part of the configuration that knows its path. A key set to None is as good as absent."""

    def __init__(self, path: str, values: Mapping[str, Any]) -> None:
        self._path = path
        self._values = values

    def get(self, key: str, default: Any) -> Any:
        value = self._values.get(key)
        return default if value is None else value

    def section(self, key: str) -> _Section:
        values = self.get(key, {})
        if not isinstance(values, Mapping):
            raise ConfigError(
                f"master_config: {self._path}{key}: found {values!r}; expected a mapping"
            )
        return _Section(f"{self._path}{key}.", values)

    def flag(self, key: str) -> bool:
        value = self.get(key, False)
        if not isinstance(value, bool):
            raise ConfigError(
                f"master_config: {self._path}{key}: found {value!r}; expected true or false"
            )
        return value

    def positive_int(self, key: str) -> int:
        value = self.get(key, _MISSING)
        if value is _MISSING:
            raise ConfigError(f"master_config: {self._path}{key} is missing; expected an int")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(
                f"master_config: {self._path}{key}: found {value!r}; expected an int of at least 1"
            )
        return value

    def optional_positive_int(self, key: str) -> int | None:
        return None if self.get(key, None) is None else self.positive_int(key)

    def positive_seconds(self, key: str, default: float) -> float:
        value = self.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < inf:
            raise ConfigError(
                f"master_config: {self._path}{key}: found {value!r}; expected seconds above 0"
            )
        return float(value)
