"""The learning rate warms up and then falls to its last fraction."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from grpo_trainer.learning_rate import learning_rate


def rates(configure, *, steps, warmup, final):
    optimizer = configure(
        {
            "policy.optimizer.learning_rate": 0.5,
            "policy.optimizer.warmup_steps": warmup,
            "policy.optimizer.final_lr_fraction": final,
        }
    ).policy.optimizer
    return [learning_rate(optimizer, step, steps) for step in range(steps)]


def test_without_warm_up_the_first_step_has_the_full_rate(configure):
    assert rates(configure, steps=4, warmup=0, final=0.0) == [0.5, 0.375, 0.25, 0.125]


def test_a_final_fraction_of_one_keeps_the_rate(configure):
    assert rates(configure, steps=3, warmup=0, final=1.0) == [0.5] * 3


def test_warm_up_grows_in_equal_parts(configure):
    assert rates(configure, steps=5, warmup=4, final=1.0) == [0.125, 0.25, 0.375, 0.5, 0.5]


@given(steps=st.integers(1, 30), warmup=st.integers(0, 40), final=st.floats(0, 1))
def test_the_rate_stays_between_nothing_and_the_full_rate(configure, steps, warmup, final):
    found = rates(configure, steps=steps, warmup=warmup, final=final)
    assert all(0 < rate <= 0.5 for rate in found)
    after = found[warmup:]
    assert after == sorted(after, reverse=True)
    if after:
        assert after[-1] >= 0.5 * final
