"""What a run reads, model, tokenizer and prompts, checked before anything is written or started."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Any  # Any: transformers' tokenizers

from grpo_trainer.config import TrainerConfig
from grpo_trainer.errors import ConfigurationError
from grpo_trainer.prompts import SHIPPED, Prompt, load_prompts, prompts_digest
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
        ConfigurationError: the cluster, the model or a data set cannot be used; names it.
    """
    _check_address(config.cluster.address)
    model, source = config.policy.model, None
    if isinstance(model, PretrainedModel):
        source = model_source(model.name)
        tokenizer = load_tokenizer(source)
    else:
        tokenizer = build_character_tokenizer(model.characters)
    encode = prompt_encoder(tokenizer, model)
    limit = config.policy.max_total_sequence_length
    training = load_prompts(config.data.train or SHIPPED / "train.jsonl", encode, max_length=limit)
    held_out: list[Prompt] = []
    if config.validation.every_steps:
        path = config.data.validation or SHIPPED / "validation.jsonl"
        held_out = load_prompts(path, encode, max_length=limit)
    return RunInputs(source, tokenizer, training, held_out)


def _check_address(address: str | None) -> None:
    """Refuse an address that nobody listens on; Ray would try for minutes."""
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return  # no address, or a word that Ray knows
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigurationError(f"cluster.address: {address!r}: {error}") from None
