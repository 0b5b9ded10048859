"""Models and tokenizers: loaded through transformers, or built small and random for the demo.

A random model is saved to the run's folder and then loaded from there like any other, so the demo
takes the same path as a real model.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any  # Any: transformers' models and tokenizers have no usable static types

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils import logging as transformers_logging

from grpo_trainer.config import PretrainedModel, RandomModel
from grpo_trainer.errors import ConfigurationError

PAD, EOS = "<pad>", "<eos>"

# Bars of loading and saving would tear the run's own display apart.
transformers_logging.disable_progress_bar()


def build_character_tokenizer(characters: str) -> PreTrainedTokenizerFast:
    """A tokenizer with a token per character of ``characters``, besides padding and end."""
    vocabulary = [PAD, EOS, *dict.fromkeys(characters)]
    tokenizer = Tokenizer(
        models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token=PAD)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        clean_up_tokenization_spaces=False,
    )


def save_random_model(model: RandomModel, folder: Path, *, seed: int, max_length: int) -> None:
    """Build the model and its tokenizer from the seed and save both to ``folder``."""
    tokenizer = build_character_tokenizer(model.characters)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=len(tokenizer),
                hidden_size=model.hidden_size,
                intermediate_size=model.intermediate_size,
                num_hidden_layers=model.num_layers,
                num_attention_heads=model.num_heads,
                num_key_value_heads=model.num_heads,
                head_dim=model.head_dim,
                max_position_embeddings=max_length,
                initializer_range=model.initializer_range,
                tie_word_embeddings=False,
                pad_token_id=tokenizer.pad_token_id,
                eos_token_id=tokenizer.eos_token_id,
                bos_token_id=None,
            )
        )
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def check_model(name: str) -> None:
    """Raise `ConfigurationError` if ``name`` is neither a model's folder nor a hub name."""
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1 or os.path.isdir(name)
    if looks_local and not Path(name).expanduser().is_dir():
        raise ConfigurationError(f"policy.model.name: {name!r}: no such folder")
    try:
        AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigurationError(f"policy.model.name: {name!r}: {reason}") from None


def load_tokenizer(name: str) -> Any:
    """The tokenizer, with a padding token.

    Raises:
        ConfigurationError: there is none, or it has neither a padding nor an end token.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigurationError(f"policy.model.name: tokenizer of {name!r}: {reason}") from None
    if tokenizer.eos_token_id is None:
        raise ConfigurationError(f"policy.model.name: tokenizer of {name!r} has no end token")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(name: str, device: torch.device) -> Any:
    """The causal LM in float32 on ``device``."""
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    return model.to(device)


def prompt_encoder(
    tokenizer: Any, model: RandomModel | PretrainedModel
) -> Callable[[str], list[int]]:
    """How the text of a prompt becomes token ids."""
    if isinstance(model, PretrainedModel) and model.use_chat_template:

        def encode_chat(text: str) -> list[int]:
            messages = [{"role": "user", "content": text}]
            rendered = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False
            )
            return list(tokenizer(rendered, add_special_tokens=False)["input_ids"])

        return encode_chat
    return lambda text: list(tokenizer(text)["input_ids"])
