"""Batches like those of a rollout, and answers of vLLM's own route to the same prompts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import httpx
import torch
from integration.vllm.server import MAX_MODEL_LEN
from integration.vllm.tiny_model import VOCABULARY

from column_io import BatchedDataDict
from rollout_actor.vllm import VllmGeneration

PAD = VOCABULARY.index("<pad>")


def batch_of(
    prompts: Sequence[Sequence[int]], stop_strings: Sequence[list[str] | None] | None = None
) -> BatchedDataDict[Any]:
    """Return prompts as a batch for `VllmGeneration.generate`."""
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    input_ids = torch.full((len(prompts), int(lengths.max())), PAD)
    for row, prompt in zip(input_ids, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    return BatchedDataDict(
        input_ids=input_ids,
        input_lengths=lengths,
        stop_strings=list(stop_strings or [None] * len(prompts)),
    )


def random_prompts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Return prompts of random bytes with the given lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, PAD, (n,), generator=generator).tolist() for n in lengths]


def back_end(*addresses: str, **arguments: Any) -> VllmGeneration:
    """Return a backend with the limits of the tests' servers."""
    defaults = {
        "pad_token_id": PAD,
        "max_total_sequence_length": MAX_MODEL_LEN,
        "max_new_tokens": 24,
        "seed": 7,
        "timeout_s": 120.0,
        "server_timeout_s": 20.0,
    }
    return VllmGeneration(addresses, **{**defaults, **arguments})


def responses_of(output: Any) -> list[tuple[list[int], list[float]]]:
    """Return token ids and log-probabilities of each response."""
    lengths = zip(
        output["generation_lengths"].tolist(),
        output["unpadded_sequence_lengths"].tolist(),
        strict=True,
    )
    return [
        (
            output["output_ids"][row, total - generated : total].tolist(),
            output["logprobs"][row, total - generated : total].tolist(),
        )
        for row, (generated, total) in enumerate(lengths)
    ]


def completions(
    address: str, prompts: Sequence[Sequence[int]], **parameters: Any
) -> list[tuple[list[int], list[float]]]:
    """Return token ids and log-probabilities from ``/v1/completions``."""
    response = httpx.post(
        f"{address}/v1/completions",
        json={
            "prompt": [list(prompt) for prompt in prompts],
            "logprobs": 0,
            "return_token_ids": True,
            **parameters,
        },
        timeout=120,
    ).raise_for_status()
    return [
        (
            choice["token_ids"],
            torch.tensor(choice["logprobs"]["token_logprobs"], dtype=torch.float32).tolist(),
        )
        for choice in sorted(response.json()["choices"], key=lambda choice: choice["index"])
    ]


def load_of(address: str) -> int:
    """Return the server's unfinished generations; one whose caller left stays counted."""
    return int(httpx.get(f"{address}/load", timeout=30).json()["server_load"])


def stable_load(address: str) -> int:
    """Return `load_of` once it has not changed for half a second.

    A thread of the server decrements the count some time after an answer.
    """
    deadline = time.monotonic() + 60
    load, since = load_of(address), time.monotonic()
    while time.monotonic() - since < 0.5:
        assert time.monotonic() < deadline, f"the load of {address} still changes after 60 s"
        time.sleep(0.02)
        if (now := load_of(address)) != load:
            load, since = now, time.monotonic()
    return load


def await_load(address: str, load: int) -> None:
    """Wait until `load_of` is at least ``load``."""
    deadline = time.monotonic() + 60
    while (current := load_of(address)) < load:
        assert time.monotonic() < deadline, f"{current} generations after 60 s; expected {load}"
        time.sleep(0.02)


def counter_of(address: str, name: str) -> int:
    """Return a counter of the server's engine, summed over its labels."""
    lines = httpx.get(f"{address}/metrics", timeout=30).text.splitlines()
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith(f"vllm:{name}{{"))
