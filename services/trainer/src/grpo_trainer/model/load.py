"""Models: loaded through transformers, or built small and random for the demo.

A random model is saved to the run's folder and loaded from there, so the demo takes the same path
as a real model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any  # Any: transformers' models have no usable static types

import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from grpo_trainer.config.sections import RandomModel
from grpo_trainer.model.tokenizer import build_character_tokenizer


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


def load_model(name: str, device: torch.device) -> Any:
    """Load the causal LM in float32 onto ``device``."""
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    return model.to(device)
