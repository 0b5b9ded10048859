"""A step's metrics are recorded under the names in docs/telemetry.md.

Imports internals: no run has each of the cases.
"""

from __future__ import annotations

import pytest

from grpo_trainer.report import step_metrics


@pytest.fixture
def recorded(monkeypatch):
    """Return what is recorded, by step; reward components have the key "components"."""
    steps = {}

    def record(step, metrics, *, components=None):
        steps[step] = {**metrics, "components": components} if components else metrics

    monkeypatch.setattr(step_metrics, "record_step_metrics", record)
    return steps


def test_a_step_is_recorded_with_documented_names_and_rates(recorded):
    metrics = {"reward": 0.5, "loss": 0.1, "kl": 0.0, "samples": 8, "tokens": 40.0, "groups": 2}
    step_metrics.record_step(6, metrics, seconds=2.0, has_kl=True, trained=56)
    assert recorded[6] == {
        "rl.reward.mean": 0.5,
        "rl.loss": 0.1,
        "rl.kl": 0.0,
        "rl.samples": 56,
        "rl.samples_per_s": 4.0,
        "rl.tokens_per_s": 20.0,
    }


def test_a_validation_belongs_to_the_weights_that_it_used(recorded):
    metrics = {"samples": 0, "validation_reward": 0.5, "validation_pass_rate": 0.25}
    step_metrics.record_step(6, metrics, seconds=2.0, has_kl=False, trained=8)
    assert recorded[7] == {"rl.validation.reward": 0.5, "rl.validation.pass_rate": 0.25}
    assert recorded[6] == {"rl.samples_per_s": 0.0, "rl.tokens_per_s": 0.0, "rl.samples": 8}


def test_a_loss_without_a_kl_term_has_no_kl(recorded):
    step_metrics.record_step(0, {"kl": 0.0, "samples": 8}, seconds=2.0, has_kl=False, trained=8)
    assert "rl.kl" not in recorded[0]


def test_reward_components_are_recorded_by_name(recorded):
    metrics = {"reward": 0.75, "reward/turn_1": 0.5, "reward/turn_2": 0.25, "samples": 8}
    step_metrics.record_step(0, metrics, seconds=2.0, has_kl=False, trained=8)
    assert recorded[0]["components"] == {"turn_1": 0.5, "turn_2": 0.25}
    assert "reward/turn_1" not in recorded[0]
