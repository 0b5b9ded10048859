"""Records of samples for the admin service: facts of all, conversation and tokens of some.

Facts are recorded after generation, conversation and tokens after training; see docs/telemetry.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any  # Any: columns, and transformers' tokenizers

import torch

from column_io import read_columns
from dataplane_core import DataPlaneClient, KVBatchMeta, MissingDataError
from dataplane_core.tags import group_of
from dataplane_core.telemetry import WEIGHT_VERSION, step_facts
from grpo_trainer.refit.weight_sync import version_number
from grpo_trainer.rollout.prompts import Prompt
from grpo_trainer.rollout.token_texts import token_texts
from grpo_trainer.samples.partition import PREV_LOGPROBS, TRAIN, WEIGHT_VERSIONS
from observability import record_sample_text, record_samples

GENERATED_TOKENS = "generated_tokens"
"""Column of a rollout that `record_generated` needs besides those of the loss."""

_MASK, _GENERATED = "token_mask", "generation_logprobs"
_FIELDS = (
    "input_ids",
    "input_lengths",
    _MASK,
    _GENERATED,
    "turn_lengths",
    "turn_roles",
    "turn_contents",
)


def record_generated(
    sample_ids: Sequence[str],
    carry: Mapping[str, Any],
    advantages: torch.Tensor,
    prompts: Sequence[Prompt],
) -> None:
    """Record facts of samples; the samples of each prompt are adjacent.

    If ``carry`` has no ``weight_versions``, the current step's weights generated all samples.
    """
    group_size = len(sample_ids) // max(1, len(prompts))
    numbers = [
        [_current_version()]
        if spans is None
        else [version_number(each["version"]) for each in spans]
        for spans in carry.get(WEIGHT_VERSIONS, [None] * len(sample_ids))
    ]
    record_samples(
        sample_ids,
        {
            "group": [group_of(each, {}) for each in sample_ids],
            "reward": carry["total_reward"].tolist(),
            "advantage": advantages.tolist(),
            "truncated": carry["truncated"].tolist(),
            "length": carry[GENERATED_TOKENS].tolist(),
            "first_version": [min(_known(each), default=None) for each in numbers],
            "last_version": [max(_known(each), default=None) for each in numbers],
            "state": ["generated"] * len(sample_ids),
            "tags": [prompt.record.tags for prompt in prompts for _ in range(group_size)],
        },
    )


def record_texts(
    client: DataPlaneClient, sample_ids: Sequence[str], tokenizer: Any, *, fields: Sequence[str]
) -> None:
    """Record conversation and tokens of samples in the store.

    Samples that lack a column are left out, such as those that a resumed run restored.

    The samples are of the partition "train". ``fields`` names which of "prev_logprobs" and
    "weight_versions" they have. Without "weight_versions", the current step's weights generated
    all samples.
    """
    for each, row in _rows(client, sample_ids, [*_FIELDS, *fields]):
        length = int(row["input_lengths"])
        mask = [bool(value) for value in row[_MASK][:length].tolist()]
        spans = row.get(WEIGHT_VERSIONS)
        current = _current_version() if spans is None else None
        version = [current if drawn else None for drawn in mask]
        for span in spans or ():
            for place in range(span["start"], span["end"]):
                version[place] = version_number(span["version"])
        generator = row[_GENERATED][:length].tolist()
        tokens: dict[str, Sequence[object]] = {
            "text": token_texts(tokenizer, row["input_ids"][:length].tolist()),
            # Only a token that was drawn has a log-probability of the generator.
            "generator": [generator[place] if drawn else None for place, drawn in enumerate(mask)],
            "mask": mask,
            "version": version,
        }
        if PREV_LOGPROBS in fields:
            # Nothing precedes the first token.
            tokens["trainer"] = [None, *row[PREV_LOGPROBS][1:length].tolist()]
        turns = [{"role": turn["role"], "content": turn["content"]} for turn in row["message_log"]]
        record_sample_text(each, turns=turns, tokens=tokens)


def _rows(
    client: DataPlaneClient, sample_ids: Sequence[str], fields: Sequence[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the columns of each sample that has all fields."""
    try:
        batch = read_columns(client, KVBatchMeta(TRAIN, None, list(sample_ids)), fields)
    except MissingDataError:
        if len(sample_ids) > 1:
            for each in sample_ids:
                yield from _rows(client, [each], fields)
        return
    for row, each in enumerate(sample_ids):
        yield each, {name: column[row] for name, column in batch.items()}


def _known(numbers: Sequence[int | None]) -> list[int]:
    return [number for number in numbers if number is not None]


def _current_version() -> int | None:
    version = step_facts().get(WEIGHT_VERSION)
    return version if isinstance(version, int) else None
