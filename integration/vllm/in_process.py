"""vLLM's `LLM` with the refit engine in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from integration.vllm.published import MAX_TOKENS, PROMPTS
from integration.vllm.tiny_model import MAX_LENGTH
from vllm import LLM, SamplingParams

_STARTED: list[LLM] = []  # kept alive: the end of one destroys the process groups of all

Answers = list[tuple[list[int], list[dict[int, float]]]]


def start(folder: Path, dtype: str = "float32", **options: Any) -> LLM:
    """Start vLLM with the refit engine, a model folder and further options."""
    llm = LLM(
        str(folder),
        dtype=dtype,
        **{
            "enforce_eager": True,
            # Otherwise cached prefixes of the old weights would be reused.
            "enable_prefix_caching": False,
            "kv_cache_memory_bytes": 134217728,
            "max_model_len": MAX_LENGTH,
            "weight_transfer_config": {"backend": "mx"},
            "worker_extension_cls": "refit_mx.engine.status.RefitStatus",
            **options,
        },
    )
    _STARTED.append(llm)
    return llm


def answers(llm: LLM) -> Answers:
    """Return by prompt the greedy tokens, and log-probabilities of the 20 most likely ones."""
    sampling = SamplingParams(
        max_tokens=MAX_TOKENS, temperature=0, logprobs=20, ignore_eos=True, detokenize=False
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    # On a GPU, the last bits depend on the other rows of a batch.
    batches = [[prompt] for prompt in prompts] if torch.cuda.is_available() else [prompts]
    return [
        (
            list(answer.outputs[0].token_ids),
            [
                {token: entry.logprob for token, entry in step.items()}
                for step in answer.outputs[0].logprobs
            ],
        )
        for batch in batches
        for answer in llm.generate(batch, sampling, use_tqdm=False)
    ]


def status(llm: LLM) -> dict[str, Any]:
    """Return the status of the only rank."""
    (rank_status,) = llm.collective_rpc("refit_status", args=("n",))
    return rank_status


def update(llm: LLM, version_id: str, **info: Any) -> None:
    """Refit the model to a version."""
    llm.start_weight_update()
    llm.update_weights({"update_info": {"version_id": version_id, **info}})
    llm.finish_weight_update()
