"""The objective is the one on paper, token by token, however the batch is split."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_trainer.loss import grpo_loss, token_logprobs

LOW, HIGH, KL = 0.2, 0.28, 0.05


@st.composite
def batches(draw):
    """Log-probabilities, advantages and a mask of some rows."""
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
    found = loss_of(batch)
    for value, expected in zip(
        (found.loss, found.kl, found.clipped, found.tokens), naive(batch), strict=True
    ):
        assert float(value) == pytest.approx(expected, abs=1e-9)


@given(batches(), st.data())
def test_the_sums_do_not_depend_on_the_split(batch, data):
    rows = len(batch["mask"])
    cuts = sorted({0, rows, *data.draw(st.lists(st.integers(0, rows)))})
    whole = loss_of(batch)
    parts = [
        loss_of({name: column[start:stop] for name, column in batch.items()})
        for start, stop in itertools.pairwise(cuts)
    ]
    for name in ("loss", "kl", "clipped", "approx_entropy", "tokens"):
        total = sum(float(getattr(part, name)) for part in parts)
        assert total == pytest.approx(float(getattr(whole, name)), abs=1e-9)


@given(batches())
def test_the_divergence_is_never_negative(batch):
    assert float(loss_of(batch).kl) >= 0
    batch["reference_logprobs"] = batch["logprobs"]
    assert float(loss_of(batch).kl) == 0


@given(st.floats(-8, 0, width=32), st.floats(-5, 0), st.booleans())
def test_the_divergence_near_the_reference_has_its_digits(logprob, magnitude, above):
    reference = torch.tensor([[logprob + (1 if above else -1) * 10**magnitude]])
    logprobs = torch.tensor([[logprob]])
    found = loss_of(
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
    assert float(found.kl) == pytest.approx(expected, rel=1e-9)


@given(batches(), st.floats(-50, 50))
def test_what_is_masked_out_does_not_count(batch, noise):
    changed = {name: column.clone() for name, column in batch.items()}
    changed["logprobs"][batch["mask"] == 0] += noise
    assert float(loss_of(changed).loss) == pytest.approx(float(loss_of(batch).loss), abs=1e-9)


@pytest.mark.parametrize("masked", [-math.inf, -200.0, 0.0, math.nan])
@pytest.mark.parametrize("name", ["logprobs", "prev_logprobs", "reference_logprobs"])
def test_a_token_that_does_not_count_may_have_any_log_probability(name, masked):
    columns = {
        each: torch.tensor([[-100.0, -2.0]])
        for each in ("logprobs", "prev_logprobs", "reference_logprobs")
    }
    columns[name][0, 0] = masked
    columns["logprobs"].requires_grad_()
    found = loss_of({**columns, "advantages": torch.ones(1), "mask": torch.tensor([[0, 1]])})
    found.loss.backward()
    assert found.loss.item() == -1.0
    assert found.kl.item() == 0.0
    assert found.approx_entropy.item() == 2.0
    assert columns["logprobs"].grad.tolist() == [[0.0, -1.0]]


@pytest.mark.parametrize("logprob", [-1.0, -math.inf])
@pytest.mark.parametrize("difference", [21.0, 88.0, 89.0, 1000.0, -1000.0])
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
def test_no_difference_between_the_policies_makes_a_sum_or_the_gradient_infinite(
    logprob, difference, advantage
):
    logprobs = torch.tensor([[logprob, -1.0]], requires_grad=True)
    found = loss_of(
        {
            "logprobs": logprobs,
            "prev_logprobs": torch.tensor([[-1.0 - difference, -1.0]]),
            "reference_logprobs": torch.tensor([[-1.0 + difference, -1.0]]),
            "advantages": torch.tensor([advantage]),
            "mask": torch.ones(1, 2),
        }
    )
    found.loss.backward()
    told = (found.loss.detach(), found.kl, found.clipped, found.approx_entropy, *logprobs.grad[0])
    assert all(math.isfinite(each) for each in told)


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
def test_only_what_moved_too_far_in_the_wanted_direction_is_clipped(ratio, advantage, clipped):
    logprobs = torch.tensor([[math.log(ratio)]], requires_grad=True)
    found = grpo_loss(
        logprobs,
        torch.zeros(1, 1),
        torch.tensor([advantage]),
        torch.ones(1, 1),
        clip_low=LOW,
        clip_high=HIGH,
    )
    found.loss.backward()
    assert bool(found.clipped) is clipped
    assert bool(logprobs.grad == 0) is (clipped or advantage == 0)


def test_the_gradient_goes_through_the_trained_policy_only():
    columns = {
        name: torch.randn(2, 3, requires_grad=True)
        for name in ("logprobs", "prev_logprobs", "advantages", "reference_logprobs")
    }
    batch = {
        name: column if name == "logprobs" else column.detach() for name, column in columns.items()
    }
    found = loss_of({**batch, "mask": torch.ones(2, 3)})
    found.loss.backward()
    assert columns["logprobs"].grad.abs().sum() > 0
    told = (found.kl, found.clipped, found.approx_entropy, found.tokens)
    assert not any(value.requires_grad for value in told)


def test_the_entropy_is_estimated_without_bias_from_what_was_drawn_before_an_update():
    generator = torch.Generator().manual_seed(1)
    before, now = (torch.randn(2, 8, generator=generator) / 2).log_softmax(1)
    drawn = torch.multinomial(before.exp(), 100_000, replacement=True, generator=generator)
    found = loss_of(
        {
            "logprobs": now[drawn][None],
            "prev_logprobs": before[drawn][None],
            "advantages": torch.ones(1),
            "mask": torch.ones(1, len(drawn)),
        }
    )
    entropy = -(now.exp() * now).sum()
    assert float(found.approx_entropy / found.tokens) == pytest.approx(float(entropy), rel=0.01)


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
        found = token_logprobs(network, padded, lengths, temperature=temperature)
        for i, row in enumerate(rows):
            scores = (network(torch.tensor([row])).logits[0] / temperature).log_softmax(-1)
            naive = [0.0] + [float(scores[t - 1, row[t]]) for t in range(1, len(row))]
            torch.testing.assert_close(found[i, : len(row)], torch.tensor(naive), atol=1e-4, rtol=0)
            assert (found[i, len(row) :] == 0).all()
