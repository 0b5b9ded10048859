"""Advantages compare a sample with the rest of its group, exactly, whatever the rewards' size.

Imports internals: no run has such rewards.
"""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_trainer.errors import AdvantageError
from grpo_trainer.samples.advantages import (
    advantages,
    group_statistics,
    mean_and_std,
)

sizes = st.integers(2, 9)
# Rewards as environments give them, huge and tiny ones, and neighbors of 0.3 and of 1000.1.
rewards = st.one_of(
    st.floats(-(2.0**100), 2.0**100, width=32),
    st.floats(0, 1, width=32),
    st.sampled_from([0.3, 1000.1, 1e6]).flatmap(
        lambda near: st.floats(near, near * (1 + 1e-6)).map(
            lambda value: torch.tensor(value).item()
        )
    ),
)


@st.composite
def groups(draw):
    """Draw rows of rewards of one group size, and which rewards count."""
    size, count = draw(sizes), draw(st.integers(1, 4))
    rows = st.lists(rewards, min_size=size, max_size=size)
    counted = st.lists(st.booleans(), min_size=size, max_size=size)
    return (
        [draw(rows) for _ in range(count)],
        [draw(counted) for _ in range(count)] if draw(st.booleans()) else None,
    )


def exact(row, counts):
    """Return each deviation from the others' mean, and the variance, as fractions."""
    kept = [Fraction(reward) for reward, counting in zip(row, counts, strict=True) if counting]
    if len(kept) < 2:
        return [Fraction(0)] * len(row), Fraction(0)
    mean = sum(kept) / len(kept)
    variance = sum((reward - mean) ** 2 for reward in kept) / (len(kept) - 1)
    deviations = []
    for reward, counting in zip(map(Fraction, row), counts, strict=True):
        others = sum(kept) - (reward if counting else 0)
        deviations.append(reward - others / (len(kept) - counting))
    return deviations, variance


def spread(row):
    return float(max(map(Fraction, row)) - min(map(Fraction, row)))


@given(groups(), st.sampled_from([torch.float32, torch.float64]))
def test_statistics_are_the_exact_fractions(drawn, dtype):
    rows, counted = drawn
    size = len(rows[0])
    flags = counted or [[True] * size] * len(rows)
    statistics = group_statistics(
        torch.tensor(rows, dtype=dtype).reshape(-1),
        size,
        counted=None if counted is None else torch.tensor(counted).reshape(-1),
    )
    for number, (row, counts) in enumerate(zip(rows, flags, strict=True)):
        deviations, variance = exact(row, counts)
        places = range(number * size, (number + 1) * size)
        rounding = 1e-15 * size * spread(row)
        for place, reward, deviation in zip(places, row, deviations, strict=True):
            assert float(statistics.deviation[place]) == pytest.approx(
                float(deviation), abs=rounding
            )
            baseline = float(Fraction(reward) - deviation)
            assert float(statistics.baseline[place]) == pytest.approx(
                baseline, rel=1e-15, abs=rounding
            )
            assert float(statistics.std[place]) == pytest.approx(math.sqrt(variance), rel=1e-12)
            assert (float(statistics.std[place]) == 0) is (variance == 0)
            assert bool(statistics.comparable[place]) is (sum(counts) >= 2)


@given(groups(), st.booleans())
def test_advantages_are_the_deviations_in_float32(drawn, normalize):
    rows, _ = drawn
    values = torch.tensor(rows, dtype=torch.float64).reshape(-1)
    column = advantages(group_statistics(values, len(rows[0])), normalize=normalize)
    assert column.dtype == torch.float32
    expected = []
    for row in rows:
        deviations, variance = exact(row, [True] * len(row))
        divisor = math.sqrt(variance) + 1e-4 if normalize else 1.0
        expected += [float(deviation) / divisor for deviation in deviations]
    scale = 1.0 if normalize else max(map(spread, rows))
    torch.testing.assert_close(column, torch.tensor(expected), rtol=2e-7, atol=1e-13 * scale)


@given(
    st.floats(allow_nan=False, allow_infinity=False, width=32), st.integers(2, 70), st.booleans()
)
def test_equal_rewards_have_exactly_no_advantage(reward, size, normalize):
    statistics = group_statistics(torch.full((size * 2,), reward), size)
    assert (statistics.std == 0).all()
    assert (statistics.baseline == reward).all()
    assert (advantages(statistics, normalize=normalize) == 0).all()


@given(st.lists(rewards, min_size=1, max_size=40))
def test_mean_and_spread_of_metrics_are_the_exact_ones(values):
    mean, std = mean_and_std(torch.tensor(values, dtype=torch.float32))
    values = torch.tensor(values, dtype=torch.float32).tolist()
    expected = sum(map(Fraction, values)) / len(values)
    variance = sum((Fraction(value) - expected) ** 2 for value in values) / max(1, len(values) - 1)
    rounding = 1e-15 * len(values) * spread(values)
    assert mean == pytest.approx(float(expected), rel=1e-15, abs=rounding)
    assert std == pytest.approx(math.sqrt(variance), rel=1e-12)


@pytest.mark.parametrize(("rows", "size"), [(6, 4), (3, 1), (4, 0)])
def test_rewards_that_do_not_fill_groups_are_refused(rows, size):
    with pytest.raises(ValueError, match=f"{rows} rewards; expected groups of {size}"):
        group_statistics(torch.zeros(rows), size)


def test_rewards_without_finite_advantages_are_refused_by_sample():
    huge = torch.tensor([3e38, -3e38, 0.0, 0.0])
    statistics = group_statistics(huge, 2)
    with pytest.raises(AdvantageError, match=r"sample 0: 6e\+38.*normalize_advantages"):
        advantages(statistics, normalize=False)
    expected = torch.tensor([2**0.5, -(2**0.5), 0.0, 0.0])
    torch.testing.assert_close(advantages(statistics, normalize=True), expected)


@pytest.mark.parametrize("reward", [float("inf"), float("nan"), 1.7e308])
def test_rewards_that_float64_cannot_compare_are_refused(reward):
    with pytest.raises(AdvantageError, match="not a finite float64"):
        group_statistics(torch.tensor([0.0, 0.0, reward, -reward], dtype=torch.float64), 2)


def test_a_spread_whose_squares_overflow_is_right():
    apart = torch.tensor([1e200, 3e200], dtype=torch.float64)
    assert group_statistics(apart, 2).std.tolist() == pytest.approx([2**0.5 * 1e200] * 2)
    assert mean_and_std(apart) == pytest.approx((2e200, 2**0.5 * 1e200))
