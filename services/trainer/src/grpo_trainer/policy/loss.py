"""Clipped GRPO objective, summed over tokens.

`grpo_loss` returns sums, because a batch is split over micro-batches and ranks. The caller divides
by the number of tokens of the entire batch, so the result does not depend on the split.

A prompt's tokens may have any log-probability, and infinity times a mask of 0 is NaN, also in the
gradient. So masked values are replaced before any exponential.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any  # Any: transformers' models

import torch

# e^20 is 5e8: far more than any update causes, and far below float32's maximum, so one token cannot
# make the sums infinite. A lower limit is not needed: the exponential goes to 0.
_LARGEST_EXPONENT = 20.0


@dataclass(frozen=True)
class LossSums:
    """Sums over the tokens of a micro-batch; all 0-d and float64.

    They are float64 because positive and negative advantages cancel in the loss, and because
    float32 counts tokens exactly only up to 2^24.

    Attributes:
        loss: objective to minimize, with its KL term.
        kl: estimate of the KL divergence to the reference policy.
        clipped: number of tokens whose ratio was clipped.
        approx_entropy: estimate of the policy's entropy, in nats, from the drawn tokens:
            ``-ratio * logprob`` each, 0 if the ratio is 0. It needs no pass over the vocabulary.
        importance: sum of the tokens' importance ratios, after truncation.
        tokens: number of tokens that count.
    """

    loss: torch.Tensor
    kl: torch.Tensor
    clipped: torch.Tensor
    approx_entropy: torch.Tensor
    importance: torch.Tensor
    tokens: torch.Tensor


def grpo_loss(
    logprobs: torch.Tensor,
    prev_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    reference_logprobs: torch.Tensor | None = None,
    kl_coefficient: float = 0.0,
    behavior_logprobs: torch.Tensor | None = None,
    max_importance_ratio: float = 1.0,
) -> LossSums:
    """Compute the clipped policy-gradient objective with an optional KL term.

    Stale samples: with ``behavior_logprobs`` the objective is the decoupled one of Hilton et al.
    2021, arXiv:2110.00641, which AReaL uses for asynchronous training (Fu et al. 2025,
    arXiv:2505.24298). ``prev_logprobs`` are those of the proximal policy, to which the update is
    clipped. A token's weight is its probability under the proximal policy, divided by the
    probability with which it was drawn, and truncated at ``max_importance_ratio`` (Espeholt et al.
    2018, arXiv:1802.01561). The weight is per token, so it also corrects a response that has tokens
    of several versions of the weights.

    Args:
        logprobs: float (rows, width), of the policy in training.
        prev_logprobs: float (rows, width), of the policy that generated, or of the proximal
            policy; constant.
        advantages: float (rows,), one per sample, or (rows, width).
        mask: (rows, width), 1 on tokens that count.
        clip_low: the probability ratio is clipped below ``1 - clip_low``.
        clip_high: the probability ratio is clipped above ``1 + clip_high``.
        reference_logprobs: float (rows, width), of the reference policy.
        behavior_logprobs: float (rows, width), those with which each token was drawn; None if these
            are ``prev_logprobs``.
        max_importance_ratio: upper bound of the importance ratio.
        kl_coefficient: weight of the KL term, estimated per token as ``exp(d) - d - 1`` with
            ``d = reference - logprobs`` (Schulman 2020, the estimator that is never negative).
            Computed as ``expm1(d) - d`` in float64: near the reference the terms of the first form
            almost cancel, and float32 would leave noise.

    Returns:
        Sums over the tokens that count. ``logprobs - prev_logprobs`` and ``d`` are limited to 20,
        without gradient above it, as in verl, which also limits both to -20.
    """
    weight = mask.to(logprobs.dtype)
    per_token = advantages if advantages.dim() == 2 else advantages[:, None]
    ratio = _limited_difference(logprobs, prev_logprobs, mask).exp()
    clipped_ratio = ratio.clamp(1 - clip_low, 1 + clip_high)
    objective = torch.minimum(ratio * per_token, clipped_ratio * per_token)
    importance = torch.ones_like(weight)
    if behavior_logprobs is not None:
        drawn_ratio = _limited_difference(prev_logprobs, behavior_logprobs, mask).exp()
        importance = drawn_ratio.clamp(max=max_importance_ratio)
        objective = objective * importance
    loss = -_sum(objective * weight)
    kl = torch.zeros((), device=logprobs.device, dtype=torch.float64)
    if reference_logprobs is not None:
        difference = _limited_difference(reference_logprobs, logprobs, mask).double()
        kl = _sum((difference.expm1() - difference) * weight)
        loss = loss + kl_coefficient * kl
    was_clipped = (clipped_ratio * per_token < ratio * per_token).to(logprobs.dtype)
    # A token whose probability became 0 has ratio 0, and 0 times infinity is NaN.
    counted = torch.where((mask > 0) & (ratio > 0), logprobs, 0.0)
    entropy = -_sum(ratio * counted * weight)
    return LossSums(
        loss,
        kl.detach(),
        _sum(was_clipped * weight).detach(),
        entropy.detach(),
        _sum(importance * weight),
        _sum(weight),
    )


def _sum(values: torch.Tensor) -> torch.Tensor:
    return values.sum(dtype=torch.float64)


def _limited_difference(
    above: torch.Tensor, below: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    return torch.where(mask > 0, above - below, 0.0).clamp(max=_LARGEST_EXPONENT)


def token_logprobs(
    model: Any, input_ids: torch.Tensor, input_lengths: torch.Tensor, *, temperature: float
) -> torch.Tensor:
    """Compute the log-probability of each token given the tokens before it.

    Args:
        model: causal LM.
        input_ids: int64 (rows, width), right-padded.
        input_lengths: int64 (rows,).
        temperature: divisor of the logits, the same as when the tokens were drawn.

    Returns:
        float32 (rows, width); position t scores token t; position 0 and padding are 0.
    """
    positions = torch.arange(input_ids.shape[1], device=input_ids.device)
    attention = (positions[None] < input_lengths[:, None]).long()
    logits = model(input_ids=input_ids, attention_mask=attention, use_cache=False).logits
    scores = (logits[:, :-1].float() / temperature).log_softmax(-1)
    picked = scores.gather(2, input_ids[:, 1:, None])[..., 0] * attention[:, 1:]
    return torch.nn.functional.pad(picked, (1, 0))
