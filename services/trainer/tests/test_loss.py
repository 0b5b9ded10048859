"""The objective equals the published formula per token, however the batch is split.

Imports internals: no run has such log-probabilities.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_trainer.policy.loss import (
    grpo_loss,
    token_logprobs,
)

LOW, HIGH, KL = 0.2, 0.28, 0.05


@st.composite
def batches(draw):
    """Draw log-probabilities, advantages and a mask."""
    rows, width = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    seed = draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    prev = normal(rows, width) - 2
    return {
        "logprobs": prev + 0.3 * normal(rows, width),
        "prev_logprobs": prev,
        "advantages": normal(rows) if draw(st.booleans()) else normal(rows, width),
        "mask": (normal(rows, width) > -0.5).double(),
        "reference_logprobs": prev + 0.2 * normal(rows, width),
    }


def loss_of(batch, **kwargs):
    options = {"clip_low": LOW, "clip_high": HIGH, "kl_coefficient": KL, **kwargs}
    return grpo_loss(**batch, **options)


def naive(batch):
    loss = kl = clipped = tokens = 0.0
    rows, width = batch["logprobs"].shape
    for i in range(rows):
        for t in range(width):
            if not batch["mask"][i, t]:
                continue
            new, old = float(batch["logprobs"][i, t]), float(batch["prev_logprobs"][i, t])
            advantage = batch["advantages"][i]
            advantage = float(advantage[t] if advantage.dim() else advantage)
            ratio = math.exp(new - old)
            limited = min(max(ratio, 1 - LOW), 1 + HIGH)
            difference = float(batch["reference_logprobs"][i, t]) - new
            divergence = math.exp(difference) - difference - 1
            loss += -min(ratio * advantage, limited * advantage) + KL * divergence
            kl += divergence
            clipped += limited * advantage < ratio * advantage
            tokens += 1
    return loss, kl, clipped, tokens


@given(batches())
def test_the_sums_are_those_of_a_loop_over_tokens(batch):
    result = loss_of(batch)
    for value, expected in zip(
        (result.loss, result.kl, result.clipped, result.tokens), naive(batch), strict=True
    ):
        assert float(value) == pytest.approx(expected, abs=1e-9)


@given(batches(), st.data())
def test_the_sums_do_not_depend_on_the_split(batch, data):
    rows = len(batch["mask"])
    cuts = sorted({0, rows, *data.draw(st.lists(st.integers(0, rows)))})
    full_batch = loss_of(batch)
    parts = [
        loss_of({name: column[start:stop] for name, column in batch.items()})
        for start, stop in itertools.pairwise(cuts)
    ]
    for name in ("loss", "kl", "clipped", "approx_entropy", "tokens"):
        total = sum(float(getattr(part, name)) for part in parts)
        assert total == pytest.approx(float(getattr(full_batch, name)), abs=1e-9)


@given(st.floats(-8, 0, width=32), st.floats(-5, 0), st.booleans())
def test_the_kl_near_the_reference_is_exact(logprob, magnitude, above):
    reference = torch.tensor([[logprob + (1 if above else -1) * 10**magnitude]])
    logprobs = torch.tensor([[logprob]])
    result = loss_of(
        {
            "logprobs": logprobs,
            "prev_logprobs": logprobs,
            "reference_logprobs": reference,
            "advantages": torch.zeros(1),
            "mask": torch.ones(1, 1),
        }
    )
    # The float32 difference is what the columns hold; from there on no digit is lost.
    difference = float(reference - logprobs)
    # The series of the estimator, in which nothing of size 1 cancels.
    expected = math.fsum(difference**n / math.factorial(n) for n in range(2, 30))
    assert float(result.kl) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("masked", [-math.inf, -200.0, 0.0, math.nan])
@pytest.mark.parametrize("name", ["logprobs", "prev_logprobs", "reference_logprobs"])
def test_a_masked_token_may_have_any_logprob(name, masked):
    columns = {
        each: torch.tensor([[-100.0, -2.0]])
        for each in ("logprobs", "prev_logprobs", "reference_logprobs")
    }
    columns[name][0, 0] = masked
    columns["logprobs"].requires_grad_()
    result = loss_of({**columns, "advantages": torch.ones(1), "mask": torch.tensor([[0, 1]])})
    result.loss.backward()
    assert result.loss.item() == -1.0
    assert result.kl.item() == 0.0
    assert result.approx_entropy.item() == 2.0
    assert columns["logprobs"].grad.tolist() == [[0.0, -1.0]]


@pytest.mark.parametrize("logprob", [-1.0, -math.inf])
@pytest.mark.parametrize("difference", [21.0, 88.0, 89.0, 1000.0, -1000.0])
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
def test_sums_and_gradient_are_finite_for_any_logprob_difference(logprob, difference, advantage):
    logprobs = torch.tensor([[logprob, -1.0]], requires_grad=True)
    result = loss_of(
        {
            "logprobs": logprobs,
            "prev_logprobs": torch.tensor([[-1.0 - difference, -1.0]]),
            "reference_logprobs": torch.tensor([[-1.0 + difference, -1.0]]),
            "advantages": torch.tensor([advantage]),
            "mask": torch.ones(1, 2),
        }
    )
    result.loss.backward()
    values = (
        result.loss.detach(),
        result.kl,
        result.clipped,
        result.approx_entropy,
        *logprobs.grad[0],
    )
    assert all(math.isfinite(each) for each in values)


@pytest.mark.parametrize(
    ("ratio", "advantage", "clipped"),
    [
        (1.5, 1.0, True),
        (1.5, -1.0, False),  # a bad token that became likelier is always pushed down
        (0.5, 1.0, False),
        (0.5, -1.0, True),
        (1.0, 1.0, False),
        (1.5, 0.0, False),
    ],
)
def test_a_ratio_is_clipped_only_where_its_advantage_pushes_it(ratio, advantage, clipped):
    logprobs = torch.tensor([[math.log(ratio)]], requires_grad=True)
    result = grpo_loss(
        logprobs,
        torch.zeros(1, 1),
        torch.tensor([advantage]),
        torch.ones(1, 1),
        clip_low=LOW,
        clip_high=HIGH,
    )
    result.loss.backward()
    assert bool(result.clipped) is clipped
    assert bool(logprobs.grad == 0) is (clipped or advantage == 0)


def test_entropy_estimate_is_unbiased_before_an_update():
    generator = torch.Generator().manual_seed(1)
    before, now = (torch.randn(2, 8, generator=generator) / 2).log_softmax(1)
    drawn = torch.multinomial(before.exp(), 100_000, replacement=True, generator=generator)
    result = loss_of(
        {
            "logprobs": now[drawn][None],
            "prev_logprobs": before[drawn][None],
            "advantages": torch.ones(1),
            "mask": torch.ones(1, len(drawn)),
        }
    )
    entropy = -(now.exp() * now).sum()
    assert float(result.approx_entropy / result.tokens) == pytest.approx(float(entropy), rel=0.01)


@settings(max_examples=15)
@given(data=st.data())
def test_log_probabilities_do_not_depend_on_the_padding(network, data):
    rows = data.draw(
        st.lists(st.lists(st.integers(2, 20), min_size=1, max_size=9), min_size=1, max_size=4)
    )
    temperature = data.draw(st.sampled_from([0.5, 1.0, 2.0]))
    lengths = torch.tensor([len(row) for row in rows])
    padded = torch.zeros(
        len(rows), int(lengths.max()) + data.draw(st.integers(0, 3)), dtype=torch.int64
    )
    for i, row in enumerate(rows):
        padded[i, : len(row)] = torch.tensor(row)
    with torch.no_grad():
        result = token_logprobs(network, padded, lengths, temperature=temperature)
        for i, row in enumerate(rows):
            scores = (network(torch.tensor([row])).logits[0] / temperature).log_softmax(-1)
            naive = [0.0] + [float(scores[t - 1, row[t]]) for t in range(1, len(row))]
            torch.testing.assert_close(
                result[i, : len(row)], torch.tensor(naive), atol=1e-4, rtol=0
            )
            assert (result[i, len(row) :] == 0).all()
