"""Sampling from a causal LM, in plain PyTorch.

Rows are left-padded internally, so that one forward pass per token serves rows of any length.
Positions count real tokens only, and the attention mask hides the padding. The log-probabilities
equal those of a right-padded training forward pass, up to the rounding of another summation order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any  # Any: transformers' models and tokenizers

import torch
from transformers import DynamicCache

from grpo_trainer.rollout.stop_strings import StopSearch


@dataclass(frozen=True)
class Response:
    """Response generated for one row.

    Attributes:
        token_ids: int64 (n,), the end token included if it was reached.
        logprobs: float32 (n,), log-probability of each token when it was drawn.
        truncated: whether the token budget ended it.
    """

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    truncated: bool


@torch.no_grad()
def sample_responses(
    model: Any,
    tokenizer: Any,
    rows: Sequence[torch.Tensor],
    *,
    max_new_tokens: Sequence[int],
    temperature: float,
    greedy: bool = False,
    stop_strings: Sequence[Sequence[str] | None] | None = None,
    generator: torch.Generator | None = None,
    before_token: Callable[[], bool] = lambda: False,
) -> list[Response]:
    """Sample a response to every row.

    Args:
        model: causal LM.
        tokenizer: its tokenizer; has the end and padding tokens, and decodes for stop strings.
        rows: int64 (length,) each, at least one token, without padding.
        max_new_tokens: budget per row; a row with 0 gets an empty, truncated response.
        temperature: divisor of the logits. With ``greedy`` it affects only the log-probabilities.
        greedy: take the most likely token.
        stop_strings: strings per row, none of them empty. A response ends with the token that
            completes one of them in its text, special tokens included. All text of that token
            stays, even after the stop string.
        generator: source of randomness; the model's device must be the generator's.
        before_token: called before each token; returns whether it changed the model's weights. The
            keys and values of the earlier tokens are then computed again.

    Returns:
        One response per row.

    Raises:
        ValueError: a stop string is empty.
    """
    if any("" in (stops or ()) for stops in stop_strings or ()):
        raise ValueError("stop_strings: found an empty string, which every text contains")
    device = next(model.parameters()).device
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    budget = torch.tensor(list(max_new_tokens), device=device)
    width = max(len(row) for row in rows)
    input_ids = torch.full((len(rows), width), pad, dtype=torch.int64)
    attention = torch.zeros((len(rows), width), dtype=torch.int64)
    for i, row in enumerate(rows):
        input_ids[i, width - len(row) :] = row
        attention[i, width - len(row) :] = 1
    input_ids, attention = input_ids.to(device), attention.to(device)
    positions = (attention.cumsum(1) - 1).clamp(min=0)
    cache = DynamicCache(config=model.config)
    finished = budget <= 0
    stopped = torch.zeros_like(finished)
    lengths = torch.zeros_like(budget)
    searches = {
        i: StopSearch(tokenizer, stops) for i, stops in enumerate(stop_strings or ()) if stops
    }
    drawn: list[torch.Tensor] = []
    drawn_logprobs: list[torch.Tensor] = []
    prompt_ids = input_ids
    while not bool(finished.all()):
        if before_token() and drawn:
            cache = DynamicCache(config=model.config)
            input_ids = torch.cat([prompt_ids, *drawn], 1)
            positions = (attention.cumsum(1) - 1).clamp(min=0)
        logits = model(
            input_ids=input_ids,
            attention_mask=attention,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        logprobs = (logits.float() / temperature).log_softmax(-1)
        if greedy:
            token = logprobs.argmax(-1, keepdim=True)
        else:
            token = torch.multinomial(logprobs.exp(), 1, generator=generator)
        drawn.append(token.masked_fill(finished[:, None], pad))
        drawn_logprobs.append(logprobs.gather(1, token))
        lengths += ~finished
        stopped |= ~finished & (token[:, 0] == end)
        if searches:
            stopped |= _at_stop_string(searches, token[:, 0], ~(finished | stopped))
        finished |= stopped | (lengths >= budget)
        input_ids = drawn[-1]
        positions = positions[:, -1:] + 1
        attention = torch.cat([attention, torch.ones_like(attention[:, :1])], 1)
    if not drawn:
        empty = torch.zeros(0)
        return [Response(empty.long(), empty, truncated=True) for _ in rows]
    all_tokens, all_logprobs = torch.cat(drawn, 1).cpu(), torch.cat(drawn_logprobs, 1).cpu()
    return [
        Response(all_tokens[i, :n], all_logprobs[i, :n], truncated=not bool(stopped[i]))
        for i, n in enumerate(lengths.tolist())
    ]


def _at_stop_string(
    searches: Mapping[int, StopSearch], tokens: torch.Tensor, active: torch.Tensor
) -> torch.Tensor:
    """Return which ``active`` rows contain a stop string with this token, bool (n,)."""
    drawn, is_active = tokens.tolist(), active.tolist()
    hits = [
        is_active[row] and row in searches and searches[row].add(drawn[row])
        for row in range(len(drawn))
    ]
    return torch.tensor(hits, device=tokens.device)
