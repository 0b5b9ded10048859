"""The configuration of a resumed run: its checkpoint's, with some keys changed or added.

What may change are the keys that say where, how long and in which portions a run works, and how
many steps it has. The others say what it computes: with another value it would be another run.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any  # Any: configurations as plain data

from grpo_trainer.config import TrainerConfig, apply_override, check_config, load_config
from grpo_trainer.errors import ConfigurationError

CHANGEABLE = (
    "cluster",
    "refit",
    "tracing",
    "checkpointing",
    "validation",
    "grpo.num_steps",
    "env.step_timeout_s",
    "policy.micro_batch_size",
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
_COMPUTED = "it changes what is computed"


@dataclass(frozen=True)
class ResumedConfig:
    """What `resumed_config` found.

    Attributes:
        config: of the resumed run.
        added: keys that the checkpoint did not have, with the shipped values that they take.
        ignored: keys that are null now, with the values that an older release ignored.
    """

    config: TrainerConfig
    added: dict[str, Any]
    ignored: dict[str, Any]


def resumed_config(
    saved: Mapping[str, Any], overrides: Sequence[str], *, source: str
) -> ResumedConfig:
    """The configuration to go on with.

    Args:
        saved: configuration of the checkpoint, perhaps of an older release with fewer keys.
        overrides: as `load_config` takes them.
        source: names the checkpoint.

    Raises:
        ConfigurationError: as `load_config`; or an override changes another key than those of
            `CHANGEABLE`, which is named.
    """
    raw = copy.deepcopy(dict(saved))
    added = dict(_add_missing(raw, load_config().model_dump(mode="json")))
    ignored = dict(_without_ignored(raw))
    before = dict(_leaves(raw))
    for override in overrides:
        apply_override(raw, override)
    after = dict(_leaves(raw))
    problems = [
        _problem(key, before.get(key), after.get(key))
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
    """Put the keys of ``shipped`` that it lacks into ``raw``; yields them."""
    for name, value in shipped.items():
        key = f"{path}{name}"
        if name not in raw:
            raw[name] = copy.deepcopy(value)
            yield key, value
        elif isinstance(value, dict) and isinstance(raw[name], dict):
            if raw[name].get("kind") != value.get("kind"):
                continue  # another kind of model, with keys of its own
            yield from _add_missing(raw[name], value, f"{key}.")


def _without_ignored(raw: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Make null what an older release ignored and this one refuses; yields it."""
    grpo = raw["grpo"]
    if grpo["max_logprob_error"] is not None and not grpo["recompute_prev_logprobs"]:
        yield "grpo.max_logprob_error", grpo["max_logprob_error"]
        grpo["max_logprob_error"] = None


def _leaves(node: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values; an empty mapping is a value."""
    for name, value in node.items():
        key = f"{path}{name}"
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{key}.")
        else:
            yield key, value


def _is_changeable(key: str) -> bool:
    return any(key == one or key.startswith(f"{one}.") for one in CHANGEABLE)


def _problem(key: str, kept: Any, found: Any) -> str:
    reason = _REASONS.get(key.partition(".")[0], _COMPUTED)
    return f"{key}: found {found!r}; a resumed run keeps {kept!r}: {reason}"
