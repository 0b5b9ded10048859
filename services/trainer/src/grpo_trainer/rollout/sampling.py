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
class Drawn:
    """Tokens of one row's response.

    Attributes:
        token_ids: int64 (n,), the end token included if it was reached.
        logprobs: float32 (n,), log-probability of each token when it was drawn.
    """

    token_ids: torch.Tensor
    logprobs: torch.Tensor


@dataclass(frozen=True)
class Response(Drawn):
    """Response generated for one row; ``truncated`` if the token budget ended it."""

    truncated: bool


SoFar = Callable[[], list[Drawn]]
"""Function that returns the tokens of each row so far."""


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
    prefixes: Sequence[Drawn | None] | None = None,
    generator: torch.Generator | None = None,
    before_token: Callable[[SoFar], bool] = lambda so_far: False,
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
        prefixes: tokens per row with which its response begins; None for none. They count in its
            budget, and the response may end with one of them. Those after its end are left out.
        generator: source of randomness; the model's device must be the generator's.
        before_token: called before each token with a function that returns the tokens of each row
            so far, on the CPU. Returns whether it changed the model's weights. If so, the keys and
            values of the earlier tokens are computed again.

    Returns:
        One response per row.

    Raises:
        ValueError: a stop string is empty.
    """
    if any("" in (stops or ()) for stops in stop_strings or ()):
        raise ValueError("stop_strings: found an empty string, which every text contains")
    device = next(model.parameters()).device
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    searches = {
        i: StopSearch(tokenizer, stops) for i, stops in enumerate(stop_strings or ()) if stops
    }
    starts = [
        _start(each, budget, end, searches.get(i))
        for i, (each, budget) in enumerate(
            zip(prefixes or [None] * len(rows), max_new_tokens, strict=True)
        )
    ]
    rows = [torch.cat([row, start.token_ids]) for row, start in zip(rows, starts, strict=True)]
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
    lengths = torch.tensor([len(start.token_ids) for start in starts], device=device)
    stopped = torch.tensor([not start.truncated for start in starts], device=device)
    finished = stopped | (lengths >= budget)
    begun_lengths = lengths.clone()
    drawn: list[torch.Tensor] = []
    drawn_logprobs: list[torch.Tensor] = []
    prompt_ids = input_ids

    def so_far() -> list[Drawn]:
        if not drawn:
            return list(starts)
        # Keep the result, so that the next call concatenates few tensors.
        drawn[:], drawn_logprobs[:] = [torch.cat(drawn, 1)], [torch.cat(drawn_logprobs, 1)]
        all_tokens, all_logprobs = drawn[0].cpu(), drawn_logprobs[0].cpu()
        return [
            Drawn(
                torch.cat([start.token_ids, all_tokens[i, :n]]),
                torch.cat([start.logprobs, all_logprobs[i, :n]]),
            )
            for i, (start, n) in enumerate(
                zip(starts, (lengths - begun_lengths).tolist(), strict=True)
            )
        ]

    while not bool(finished.all()):
        if before_token(so_far) and drawn:
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
        input_ids = drawn[-1]
        lengths += ~finished
        stopped |= ~finished & (token[:, 0] == end)
        if searches:
            stopped |= _at_stop_string(searches, token[:, 0], ~(finished | stopped))
        finished |= stopped | (lengths >= budget)
        positions = positions[:, -1:] + 1
        attention = torch.cat([attention, torch.ones_like(attention[:, :1])], 1)
    return [
        Response(response.token_ids, response.logprobs, truncated=not is_stopped)
        for response, is_stopped in zip(so_far(), stopped.tolist(), strict=True)
    ]


def _start(prefix: Drawn | None, budget: int, end: int, search: StopSearch | None) -> Response:
    """Return the beginning of a response; it is truncated unless it is finished."""
    if prefix is None:
        return Response(torch.zeros(0, dtype=torch.int64), torch.zeros(0), truncated=True)
    for n, token in enumerate(prefix.token_ids[:budget].tolist(), start=1):
        if token == end or (search is not None and search.add(token)):
            return Response(prefix.token_ids[:n], prefix.logprobs[:n], truncated=False)
    return Response(prefix.token_ids[:budget], prefix.logprobs[:budget], truncated=True)


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
