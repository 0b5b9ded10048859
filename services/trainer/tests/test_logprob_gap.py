"""The log-probability gap of policy and generator equals its definition.

Imports internals: no run has such gaps.
"""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_trainer.policy.logprob_gap import LogprobGap

LOGPROBS = st.floats(-30, 0, width=32)
ROWS = st.lists(st.tuples(LOGPROBS, LOGPROBS, st.booleans()), min_size=1, max_size=200)


def gap_of(rows):
    policy, generator, mask = (torch.tensor([column]) for column in zip(*rows, strict=True))
    return LogprobGap.of(policy, generator, mask.bool())


@given(rows=ROWS)
def test_metrics_are_those_of_the_masked_tokens(rows):
    log_ratios = [policy - generator for policy, generator, counts in rows if counts]
    metrics = gap_of(rows).metrics
    sizes = sorted(map(abs, log_ratios)) or [0.0]
    count = max(len(log_ratios), 1)
    assert metrics["rollout_logprob_diff_mean"] == pytest.approx(sum(sizes) / count)
    assert metrics["rollout_logprob_diff_max"] == pytest.approx(sizes[-1])
    k3 = sum(math.expm1(value) - value for value in log_ratios) / count
    assert metrics["rollout_k3_kl"] == pytest.approx(k3, rel=1e-6, abs=1e-9)
    p99 = sizes[max(0, math.ceil(0.99 * len(sizes)) - 1)]
    assert p99 - 1e-9 <= metrics["rollout_logprob_diff_p99"] <= 1.07 * p99 + 1e-9


@given(rows=ROWS, cut=st.integers(0, 200))
def test_parts_add_up_to_the_total(rows, cut):
    parts = [part for part in (rows[:cut], rows[cut:]) if part]
    total = LogprobGap.total(map(gap_of, parts)).metrics
    assert total == pytest.approx(gap_of(rows).metrics)


def test_tokens_without_a_finite_gap_are_left_out():
    gap = gap_of([(-1.0, -1.5, True), (-math.inf, -1.0, True), (math.nan, -1.0, True)])
    assert gap.tokens == 1
    assert gap.metrics["rollout_logprob_diff_max"] == 0.5
    assert LogprobGap.total([]).metrics == dict.fromkeys(gap.metrics, 0.0)
