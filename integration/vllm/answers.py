"""Answers of a vLLM server, token by token; they are equal only if all weights are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import torch
from integration.vllm.tiny_model import VOCABULARY

TIMEOUT_S = 120.0
MAX_TOKENS = 32


def random_prompt(length: int, seed: int) -> list[int]:
    """Return a prompt of random bytes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, len(VOCABULARY) - 2, (length,), generator=generator).tolist()


PROMPTS = [random_prompt(length, seed) for seed, length in enumerate((4, 17, 64, 200, 333, 600))]


@dataclass(frozen=True)
class Answer:
    """One response.

    Attributes:
        tokens: token ids.
        logprobs: log-probability of each token and of the 20 most likely ones at its place, by
            ``token_id:<id>``.
    """

    tokens: list[int]
    logprobs: list[dict[str, float]]


def generate(address: str, prompt: Sequence[int], max_tokens: int = MAX_TOKENS) -> Answer:
    """Generate one greedy response of exactly ``max_tokens`` tokens."""
    body = {
        "model": "tiny",
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 20,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,  # all tokens that are no valid text have the same text
    }
    choice = _post(address, "/v1/completions", body)["choices"][0]
    return Answer(choice["token_ids"], choice["logprobs"]["top_logprobs"])


def generate_spans(
    address: str, prompt: Sequence[int], max_tokens: int
) -> tuple[list[int], list[tuple[str, int]]]:
    """Generate one greedy response; return its tokens, and where each weight version ends."""
    body = {
        "token_ids": list(prompt),
        "sampling_params": {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True},
    }
    choice = _post(address, "/inference/v1/generate", body)["choices"][0]
    spans = [(span["version"], span["end"]) for span in choice["weight_versions"]]
    return choice["token_ids"], spans


def answers(address: str, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[Answer]:
    """Generate responses one by one, since batching changes the last bits."""
    return [generate(address, prompt) for prompt in prompts]


def _post(address: str, path: str, body: dict[str, Any]) -> Any:
    return (
        httpx.post(address + path, json=body, timeout=TIMEOUT_S, trust_env=False)
        .raise_for_status()
        .json()
    )
