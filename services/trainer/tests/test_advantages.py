"""Advantages compare a sample with the rest of its group."""

from __future__ import annotations

import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_trainer.advantages import advantages, group_statistics

groups = st.integers(2, 6).flatmap(
    lambda size: st.lists(
        st.lists(st.floats(0, 1, width=32), min_size=size, max_size=size), min_size=1, max_size=4
    )
)


@given(groups)
def test_the_baseline_is_the_mean_of_the_others(rows):
    found = group_statistics(torch.tensor(rows).reshape(-1), len(rows[0]))
    naive = [statistics.fmean(row[:i] + row[i + 1 :]) for row in rows for i in range(len(row))]
    torch.testing.assert_close(found.baseline, torch.tensor(naive), atol=1e-5, rtol=0)


@given(groups)
def test_the_spread_is_the_standard_deviation_of_the_group(rows):
    found = group_statistics(torch.tensor(rows).reshape(-1), len(rows[0]))
    naive = [statistics.stdev(row) for row in rows for _ in row]
    torch.testing.assert_close(found.std, torch.tensor(naive), atol=1e-5, rtol=1e-5)


@given(groups, st.booleans())
def test_advantages_are_the_naive_ones(rows, normalize):
    rewards = torch.tensor(rows).reshape(-1)
    found = advantages(rewards, group_statistics(rewards, len(rows[0])), normalize=normalize)
    naive = []
    for row in rows:
        for i, reward in enumerate(row):
            above = reward - statistics.fmean(row[:i] + row[i + 1 :])
            naive.append(above / (statistics.stdev(row) + 1e-4) if normalize else above)
    torch.testing.assert_close(found, torch.tensor(naive), atol=1e-2, rtol=1e-3)


@given(st.floats(0, 1, width=32), st.integers(2, 16), st.integers(1, 3))
def test_equal_rewards_have_exactly_no_spread(reward, size, count):
    found = group_statistics(torch.full((size * count,), reward), size)
    assert (found.std == 0).all()


@given(st.floats(0, 1, width=32), st.integers(2, 16))
def test_one_different_reward_gives_the_group_a_spread(reward, size):
    rewards = torch.full((size,), reward)
    rewards[-1] += 0.5
    assert (group_statistics(rewards, size).std > 0).all()


@pytest.mark.parametrize(("rows", "size"), [(6, 4), (3, 1), (4, 0)])
def test_rewards_that_are_no_groups_are_refused(rows, size):
    with pytest.raises(ValueError, match=f"{rows} rewards; expected groups of {size}"):
        group_statistics(torch.zeros(rows), size)
