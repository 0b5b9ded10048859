"""Inputs of a run: model, tokenizer and prompts, checked before anything is written or started."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any  # Any: transformers' tokenizers

from grpo_trainer.config.loading import TrainerConfig
from grpo_trainer.config.sections import PretrainedModel
from grpo_trainer.errors import ConfigurationError
from grpo_trainer.model.chat_turn import chat_turn
from grpo_trainer.model.tokenizer import (
    build_character_tokenizer,
    load_tokenizer,
    model_source,
    prompt_encoder,
    tokenizer_digest,
)
from grpo_trainer.refit.settings import check_control
from grpo_trainer.rollout.prompts import SHIPPED, Encode, Prompt, load_prompts, prompts_digest
from grpo_trainer.rollout.vllm_options import check_vllm

DIGEST_FORM = "2:"
"""Prefix of digests that can be compared; it changes with what the digests cover."""

_CONNECT_S = 5.0


@dataclass(frozen=True)
class RunInputs:
    """Checked inputs of a run.

    Attributes:
        model: folder or hub name, or None for a random model that is built later.
        tokenizer: the model's tokenizer.
        training: prompts to train on.
        held_out: prompts of the validation; empty if there is none.
        digests: digest of each input, with the prefix `DIGEST_FORM`, by configuration key.
    """

    model: str | None
    tokenizer: Any
    training: list[Prompt]
    held_out: list[Prompt]
    digests: dict[str, str]


def read_inputs(config: TrainerConfig) -> RunInputs:
    """Read all inputs that the configuration names.

    Raises:
        ConfigurationError: naming the cluster, vLLM, model, data set or environment text that
            cannot be used.
        WorkerError: a refit server does not answer.
    """
    _check_address(config.cluster.address)
    check_vllm(config)
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
    digests = {key: DIGEST_FORM + digest for key, digest in digests.items()}
    check_control(config.refit)
    return RunInputs(source, tokenizer, training, held_out, digests)


def _check_follow_ups(path: Path, tokenizer: Any, encode: Encode, config: TrainerConfig) -> None:
    """Refuse the follow-ups of ``path`` if the model cannot be asked follow-ups."""
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
    """Refuse an address that does not accept connections; Ray would retry for minutes."""
    key, ray_address = "cluster.address", os.environ.get("RAY_ADDRESS")
    ray = sys.modules.get("ray")  # slow to import; imported if Ray is initialized in this process
    if ray_address and address is None and not (ray and ray.is_initialized()):
        raise ConfigurationError(
            f"RAY_ADDRESS: found {ray_address!r}, while cluster.address is null, which starts a "
            "new cluster; unset RAY_ADDRESS, or join its cluster with --set cluster.address=auto"
        )
    if ray_address and address == "auto":
        key, address = "RAY_ADDRESS", ray_address  # Ray resolves it the same way
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return  # no address, or a keyword of Ray
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigurationError(f"{key}: {address!r}: {error}") from None
