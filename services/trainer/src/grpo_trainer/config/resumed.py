"""The configuration of a resumed run: its checkpoint's, with some keys changed or added.

A resume may change the keys of `CHANGEABLE`: where a run executes, its time limits, the sizes of
its micro-batches and stores, what it reports and saves, and its number of steps. The other keys
determine the results: with other values it would be another run.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any  # Any: configurations as plain data

from grpo_trainer.config.loading import TrainerConfig, apply_override, check_config, load_config
from grpo_trainer.errors import ConfigurationError

CHANGEABLE = (
    "cluster",
    "refit",
    "tracing",
    "tracking",
    "checkpointing",
    "validation",
    "grpo.num_steps",
    "grpo.asynchronous.generators",
    "grpo.asynchronous.min_generators",
    "grpo.asynchronous.replace_lost",
    "env.step_timeout_s",
    "policy.when_rank_dies",
    "policy.micro_batch_size",
    "policy.generation.addresses",
    "policy.generation.servers",
    "policy.generation.command",
    "policy.generation.start_timeout_s",
    "policy.generation.max_requests_per_server",
    "policy.dynamic_batching.max_tokens_per_microbatch",
    "data_plane.storage_capacity",
    "data_plane.num_storage_units",
    "data_plane.claim_meta_poll_interval_s",
    "data_plane.global_segment_size",
    "data_plane.local_buffer_size",
    "data_plane.ack_timeout_ms",
    "data_plane.claim_lease_s",
    "data_plane.unit_resources",
    "data_plane.observability",
)
"""Keys and sections that a resume may change."""

_REASONS = {
    "run": "a run keeps its name, folder and seed",
    "data": "a run keeps its prompts",
    "data_plane": "only its sizes, time-outs, unit_resources and observability may change",
}


@dataclass(frozen=True)
class ResumedConfig:
    """Configuration of a resumed run, with its differences from the checkpoint's.

    Attributes:
        config: configuration of the resumed run.
        added: keys that the checkpoint lacks, with the shipped values that they get.
        ignored: saved values of the keys that an older release ignored, and that are now null.
    """

    config: TrainerConfig
    added: dict[str, Any]
    ignored: dict[str, Any]


def resumed_config(
    saved: Mapping[str, Any], overrides: Sequence[str], *, source: str
) -> ResumedConfig:
    """Return the configuration with which the run continues.

    Args:
        saved: configuration of the checkpoint, perhaps of an older release with fewer keys.
        overrides: as in `load_config`.
        source: name of the checkpoint, for messages.

    Raises:
        ConfigurationError: as `load_config`; also naming a changed key that is not `CHANGEABLE`.
    """
    raw = copy.deepcopy(dict(saved))
    added = dict(_add_missing(raw, load_config().model_dump(mode="json")))
    ignored = dict(_clear_ignored(raw))
    before = dict(flatten_keys(raw))
    for override in overrides:
        apply_override(raw, override)
    after = dict(flatten_keys(raw))
    problems = [
        f"{key}: found {after.get(key)!r}; a resumed run keeps {before.get(key)!r}: "
        f"{_REASONS.get(key.partition('.')[0], 'the key changes the results')}"
        for key in sorted({*before, *after})
        if (key in before, before.get(key)) != (key in after, after.get(key))
        and not _is_changeable(key)
    ]
    if problems:
        raise ConfigurationError("; ".join(problems))
    return ResumedConfig(check_config(raw, source=source), added, ignored)


def _add_missing(
    raw: dict[str, Any], shipped: Mapping[str, Any], path: str = ""
) -> Iterator[tuple[str, Any]]:
    """Add the keys of ``shipped`` that ``raw`` lacks, and yield them."""
    for name, value in shipped.items():
        key = f"{path}{name}"
        if name not in raw:
            raw[name] = copy.deepcopy(value)
            yield key, value
        elif isinstance(value, dict) and isinstance(raw[name], dict):
            if raw[name].get("kind") != value.get("kind"):
                continue  # another kind of model, which has other keys
            if key == "policy.generation" and raw[name].get("backend") not in (
                None,  # to be added
                value["backend"],
            ):
                continue  # another backend, which has other keys
            yield from _add_missing(raw[name], value, f"{key}.")


def _clear_ignored(raw: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Set to null, and yield, the keys that an older release ignored and this one refuses."""
    grpo = raw["grpo"]
    if grpo["max_logprob_error"] is not None and not grpo["recompute_prev_logprobs"]:
        yield "grpo.max_logprob_error", grpo["max_logprob_error"]
        grpo["max_logprob_error"] = None


def flatten_keys(node: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values; an empty mapping is a value."""
    for name, value in node.items():
        key = f"{path}{name}"
        if isinstance(value, dict) and value:
            yield from flatten_keys(value, f"{key}.")
        else:
            yield key, value


def _is_changeable(key: str) -> bool:
    return any(key == known or key.startswith(f"{known}.") for known in CHANGEABLE)
