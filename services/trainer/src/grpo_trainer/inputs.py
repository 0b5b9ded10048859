"""What a run reads, model, tokenizer and prompts, checked before anything is written or started."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any  # Any: transformers' tokenizers

from grpo_trainer.config import TrainerConfig
from grpo_trainer.errors import ConfigurationError
from grpo_trainer.prompts import SHIPPED, Encode, Prompt, load_prompts, prompts_digest
from grpo_trainer.sections import PretrainedModel
from grpo_trainer.tokenizer import (
    build_character_tokenizer,
    load_tokenizer,
    model_source,
    prompt_encoder,
)

_CONNECT_S = 5.0


@dataclass(frozen=True)
class RunInputs:
    """What `read_inputs` found good.

    Attributes:
        model: folder or hub name, or None for a random model that is yet to be built.
        tokenizer: the model's.
        training: prompts to train on.
        held_out: prompts of the validation passes; empty if there are none.
    """

    model: str | None
    tokenizer: Any
    training: list[Prompt]
    held_out: list[Prompt]

    @property
    def data_digests(self) -> dict[str, str]:
        """The data sets that the run reads: key of the configuration to `prompts_digest`."""
        sets = {"data.train": self.training, "data.validation": self.held_out}
        return {key: prompts_digest(prompts) for key, prompts in sets.items() if prompts}


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
    training = _load(config.data.train or SHIPPED / "train.jsonl", encode, config)
    held_out: list[Prompt] = []
    if config.validation.every_steps:
        held_out = _load(config.data.validation or SHIPPED / "validation.jsonl", encode, config)
    return RunInputs(source, tokenizer, training, held_out)


def _load(path: Path, encode: Encode, config: TrainerConfig) -> list[Prompt]:
    """The prompts of a data set; those with follow-ups need words of the environment as well."""
    prompts = load_prompts(path, encode, max_length=config.policy.max_total_sequence_length)
    first = next((prompt.record for prompt in prompts if prompt.record.follow_ups), None)
    if first is None:
        return prompts
    model = config.policy.model
    if isinstance(model, PretrainedModel) and model.use_chat_template:
        # A template says what stands between a response and the next question, which depends on
        # whether the response came to its end; the environment sees no more of it than its text.
        raise ConfigurationError(
            f"policy.model.use_chat_template: found True; expected false with data set {path}, "
            f"which has follow-ups, to {first.prompt!r} first: what the environment says between "
            "turns is not rendered through a template"
        )
    for key, text in (("env.correct", config.env.correct), ("env.wrong", config.env.wrong)):
        try:
            encode(text)
        except ValueError as error:
            raise ConfigurationError(f"{key}: {error}") from None
    return prompts


def _check_address(address: str | None) -> None:
    """Refuse an address that nobody listens on; Ray would try for minutes."""
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return  # no address, or a word that Ray knows
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigurationError(f"cluster.address: {address!r}: {error}") from None
