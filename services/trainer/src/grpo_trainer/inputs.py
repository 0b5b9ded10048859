"""What a run reads, model, tokenizer and prompts, checked before anything is written or started."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any  # Any: transformers' tokenizers

from grpo_trainer.chat_turn import chat_turn
from grpo_trainer.config import TrainerConfig
from grpo_trainer.errors import ConfigurationError
from grpo_trainer.prompts import SHIPPED, Encode, Prompt, load_prompts, prompts_digest
from grpo_trainer.sections import PretrainedModel
from grpo_trainer.tokenizer import (
    build_character_tokenizer,
    load_tokenizer,
    model_source,
    prompt_encoder,
    tokenizer_digest,
)

DIGEST_FORM = "2:"
"""Another one for digests of other things: only those of one form can be compared."""

_CONNECT_S = 5.0


@dataclass(frozen=True)
class RunInputs:
    """What `read_inputs` found good.

    Attributes:
        model: folder or hub name, or None for a random model that is yet to be built.
        tokenizer: the model's.
        training: prompts to train on.
        held_out: prompts of the validation passes; empty if there are none.
        digests: key of the configuration to a digest of what the run reads there, which begins with
            `DIGEST_FORM`.
    """

    model: str | None
    tokenizer: Any
    training: list[Prompt]
    held_out: list[Prompt]
    digests: dict[str, str]


def read_inputs(config: TrainerConfig) -> RunInputs:
    """Read everything that the configuration names.

    Raises:
        ConfigurationError: the cluster, the model, a data set or what the environment says before
            its follow-ups cannot be used; names it.
    """
    _check_address(config.cluster.address)
    model, source = config.policy.model, None
    if isinstance(model, PretrainedModel):
        source = model_source(model.name)
        tokenizer = load_tokenizer(source)
    else:
        tokenizer = build_character_tokenizer(model.characters)
    encode = prompt_encoder(tokenizer, model)

    def load(path: Path) -> list[Prompt]:
        prompts = load_prompts(path, encode, max_length=config.policy.max_total_sequence_length)
        if any(prompt.record.follow_ups for prompt in prompts):
            _check_follow_ups(path, tokenizer, encode, config)
        return prompts

    training = load(config.data.train or SHIPPED / "train.jsonl")
    held_out: list[Prompt] = []
    if config.validation.every_steps:
        held_out = load(config.data.validation or SHIPPED / "validation.jsonl")
    digests = {
        "data.train": prompts_digest(training),
        "policy.model": tokenizer_digest(tokenizer, model),
    }
    if held_out:
        digests["data.validation"] = prompts_digest(held_out)
    told = {key: DIGEST_FORM + digest for key, digest in digests.items()}
    return RunInputs(source, tokenizer, training, held_out, told)


def _check_follow_ups(path: Path, tokenizer: Any, encode: Encode, config: TrainerConfig) -> None:
    """Refuse follow-ups, which ``path`` has, if the model cannot be asked them."""
    model = config.policy.model
    if isinstance(model, PretrainedModel) and model.use_chat_template:
        turn = chat_turn(tokenizer, model)
        if isinstance(turn, str):
            raise ConfigurationError(
                f"policy.model.use_chat_template: found True; the chat template of {model.name!r} "
                f"{turn}, so the follow-ups of data set {path} cannot be asked; expected data "
                "without them"
            )
        return
    for key, text in (("env.correct", config.env.correct), ("env.wrong", config.env.wrong)):
        try:
            encode(text)
        except ValueError as error:
            raise ConfigurationError(f"{key}: {error}") from None


def _check_address(address: str | None) -> None:
    """Refuse an address that nobody listens on; Ray would try for minutes."""
    key, named = "cluster.address", os.environ.get("RAY_ADDRESS")
    ray = sys.modules.get("ray")  # who runs in a Ray of its own has imported it; it is slow to
    if named and address is None and not (ray and ray.is_initialized()):
        raise ConfigurationError(
            f"RAY_ADDRESS: found {named!r}, while cluster.address is null, which starts a Ray for "
            "the run; unset RAY_ADDRESS, or join that cluster with --set cluster.address=auto"
        )
    if named and address == "auto":
        key, address = "RAY_ADDRESS", named  # as Ray has it
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return  # no address, or a word that Ray knows
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigurationError(f"{key}: {address!r}: {error}") from None
