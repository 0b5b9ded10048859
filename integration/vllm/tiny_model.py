"""A tiny random Qwen3 with a byte-level tokenizer, made locally without a download."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

MAX_LENGTH = 2048
"""Longest sequence of the model, in tokens."""

EOS = "<eos>"
VOCABULARY = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<pad>", EOS]


def save_tiny_model(
    folder: Path, *, seed: int = 0, tied: bool = False, key_value_heads: int = 2
) -> Path:
    """Write the model and its tokenizer, one token per byte, to ``folder``.

    Args:
        folder: created if absent.
        seed: seed of the weights; the shapes do not depend on it.
        tied: the output layer shares the embedding's weights.
        key_value_heads: number of key-value heads; if there are more ranks, they share heads.

    Returns:
        ``folder``.
    """
    build_tokenizer().save_pretrained(folder)
    config = Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=key_value_heads,
        head_dim=32,  # the smallest that vLLM's attention on CPU has
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=tied,
        initializer_range=0.2,  # wide, so that tokens differ clearly in probability
        pad_token_id=VOCABULARY.index("<pad>"),
        eos_token_id=VOCABULARY.index(EOS),
        bos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config).to(torch.float32)
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms, which are 1 in each fresh model
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
        model.save_pretrained(folder)
    return folder


def save_random_model(
    folder: Path, make: Callable[[], PreTrainedModel], seed: int, dtype: torch.dtype
) -> Path:
    """Write a model that ``make`` returns with random weights, and the tokenizer, to ``folder``."""
    build_tokenizer().save_pretrained(folder)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        make().to(dtype).save_pretrained(folder)
    return folder


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte, a padding and an end token."""
    tokenizer = Tokenizer(
        models.BPE(vocab={token: number for number, token in enumerate(VOCABULARY)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token=EOS,
        clean_up_tokenization_spaces=False,
    )
