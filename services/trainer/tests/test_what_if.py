"""Predictions of the what-if model, and its reading of a run's telemetry."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest

from grpo_trainer.errors import TrainerError
from grpo_trainer.what_if import Durations, Setting, predict, recording_of
from observability.records import Event, Process, Records, Span

ROLLOUT_S, REFIT_S, TRAIN_S = 5.0, 1.0, 3.0
BASE = Durations([ROLLOUT_S], [REFIT_S], [TRAIN_S], groups_per_step=8, groups_per_rollout=8)
"""Durations of a run with one rollout per step."""


def step_s(durations, generators=1, concurrent=1, staleness=0):
    shares = predict(durations, Setting(generators, concurrent, staleness), 60, skipped=10)
    return pytest.approx(shares.step_s)


def test_without_staleness_a_step_is_the_sum_of_its_parts():
    shares = predict(BASE, Setting(1, 1, 0), 10)
    assert shares.step_s == pytest.approx(REFIT_S + ROLLOUT_S + TRAIN_S)
    assert shares.trainer_idle == pytest.approx(5 / 9)
    assert shares.generators_idle == pytest.approx(4 / 9)


def test_large_staleness_lets_the_slower_side_set_the_step():
    assert step_s(BASE, staleness=4) == ROLLOUT_S
    assert step_s(replace(BASE, train_s=[9.0]), staleness=4) == REFIT_S + 9.0
    idle = predict(replace(BASE, train_s=[9.0]), Setting(1, 1, 4), 60, skipped=10)
    assert idle.trainer_idle == pytest.approx(0.0, abs=1e-9)
    assert idle.generators_idle == pytest.approx(0.5)


def test_generators_share_a_step():
    # Two of them generate the rollouts of two steps at the same time.
    assert step_s(replace(BASE, rollouts_s=[12.0]), generators=2, staleness=4) == 6.0


def test_training_begins_with_the_first_ready_groups():
    # Four rollouts of two groups, two at a time: ready after 5 and 10 s. The first four groups
    # train meanwhile, in 1.5 s; the others after that.
    small = replace(BASE, groups_per_rollout=2)
    assert step_s(small, concurrent=2) == REFIT_S + 2 * ROLLOUT_S + TRAIN_S / 2


def test_dropped_groups_are_replaced():
    half = predict(replace(BASE, groups_per_rollout=1, kept=0.5), Setting(1, 1, 4), 60, skipped=10)
    assert half.step_s == pytest.approx(2 * 8 * ROLLOUT_S, rel=0.05)
    batches = replace(BASE, kept=0.6, fills_batch=True, groups_per_step=4)
    # One batch of eight is nearly always enough for four groups, and the surplus is dropped.
    assert predict(batches, Setting(1, 1, 0), 60).step_s == pytest.approx(9.0, rel=0.15)


def test_groups_that_became_too_stale_are_dropped():
    # Every second rollout outlasts the next step, which must not use it.
    slow = replace(BASE, rollouts_s=[1.0, 100.0], groups_per_rollout=4)
    bounded = predict(slow, Setting(2, 1, 0), 60).step_s
    unbounded = predict(slow, Setting(2, 1, 8), 60).step_s
    assert bounded > unbounded


def test_a_recorded_run_ends_with_its_last_group():
    shares = predict(replace(BASE, groups_per_rollout=1), Setting(1, 1, 4), 2, limit=16)
    assert shares.step_s * 2 == pytest.approx(REFIT_S + 16 * ROLLOUT_S + TRAIN_S / 8)


class Telemetry:
    """Telemetry of a run whose times are in seconds."""

    def __init__(self):
        self.records, self._ids = Records(), count(1)
        self.driver, self.generator = Process("grpo.driver"), Process("grpo.rollout")
        self.ranks = Process("grpo.policy", "0"), Process("grpo.policy", "1")

    def span(self, name, process, start, end, trace, parent=None, **attributes):
        span_id = f"{next(self._ids):016x}"
        self.records.spans.append(
            Span(
                trace,
                span_id,
                parent,
                name,
                "internal",
                int(start * 1e9),
                int(end * 1e9),
                {"rl.run_id": "run", **attributes},
                process,
            )
        )
        return span_id

    def event(self, name, process, time, trace, groups, **attributes):
        ids = tuple(f"{group}_g{number}" for group in groups for number in range(4))
        self.records.events.append(
            Event(
                name, int(time * 1e9), {"rl.run_id": "run", **attributes}, ids, process, trace, ""
            )
        )


def asynchronous(replaced_after=6):
    """Two steps of 10 s: refit of 1 s, then a wait of 4 s, training of 3 s, 2 s of anything else.

    Rollouts of 6 s, each of one group, two at a time; four groups fit into the store. Another
    generator runs those from number ``replaced_after`` on.
    """
    recorded = Telemetry()
    for step, began in enumerate((0.0, 10.0)):
        trace = f"step {step}"
        root = recorded.span("grpo.step", recorded.driver, began, began + 10, trace)
        recorded.span("refit", recorded.driver, began, began + 1, trace, root)
        recorded.span("train", recorded.driver, began + 1, began + 8, trace, root)
        for rank, lag in zip(recorded.ranks, (0.0, 1.0), strict=True):
            # The second rank starts to train later; the first one waits for it at the end.
            optimizing = recorded.span("optimizer_step", rank, began + 1, began + 8, trace)
            recorded.span("receive train", rank, began + 1, began + 4 + lag, trace, optimizing)
        trained = [2 * step, 2 * step + 1]
        put = range(4) if step == 0 else (4, 5)
        recorded.event("put", recorded.driver, began + 1, trace, put)
        recorded.event("trained", recorded.ranks[0], began + 8, trace, trained)
        recorded.event("cleared", recorded.driver, began + 9, trace, trained)
    for group in range(6):
        trace, began = f"rollout {group}", 1 + group // 2 * 6
        generator = Process("grpo.rollout", str(group >= replaced_after))
        recorded.span("grpo.rollout", generator, began, began + 6, trace)
        recorded.event("put", generator, began + 6, trace, [group])
    return recorded.records


def test_a_replaced_generator_counts_once():
    assert recording_of(asynchronous(replaced_after=2)).setting.generators == 1
    assert recording_of(asynchronous(replaced_after=3)).setting.generators == 2


def test_an_asynchronous_run_is_read_from_its_telemetry():
    recording = recording_of(asynchronous())
    assert recording.setting == Setting(generators=1, concurrent_rollouts=2, staleness=1)
    durations = recording.durations
    assert list(durations.rollouts_s) == [6.0] * 6
    assert list(durations.train_s) == [3.0, 3.0]
    assert list(durations.fixed_s) == [3.0, 3.0]
    assert (durations.groups_per_step, durations.groups_per_rollout) == (2, 1)
    assert (durations.kept, durations.fills_batch) == (1.0, False)
    assert recording.max_groups == 6
    # Two rollouts run at a time, until one second before the run's end.
    shares = recording.shares
    assert (shares.step_s, shares.trainer_idle) == (10.0, 0.4)
    assert shares.generators_idle == pytest.approx(0.1)


def synchronous():
    """A step: refit of 1 s, two batches of 5 s, scoring of 1 s, training of 2 s."""
    recorded = Telemetry()
    root = recorded.span("grpo.step", recorded.driver, 0, 14, "step")
    for name, start, end in (
        ("refit", 0, 1),
        ("rollout", 1, 6),
        ("rollout", 6, 11),
        ("logprobs", 11, 12),
        ("train", 12, 14),
    ):
        recorded.span(name, recorded.driver, start, end, "step", root)
    recorded.event("put", recorded.generator, 6, "step", range(8))
    recorded.event("put", recorded.generator, 11, "step", range(8, 16))
    recorded.event(
        "dropped", recorded.driver, 11, "step", range(4), **{"dataplane.reason": "equal_rewards"}
    )
    recorded.event(
        "dropped", recorded.driver, 11, "step", range(12, 16), **{"dataplane.reason": "surplus"}
    )
    recorded.event("trained", recorded.ranks[0], 14, "step", range(4, 12))
    return recorded.records


def test_a_synchronous_run_is_read_from_its_telemetry():
    recording = recording_of(synchronous())
    durations = recording.durations
    assert recording.setting == Setting(1, 1, 0)
    assert list(durations.rollouts_s) == [5.0, 5.0]
    assert (list(durations.fixed_s), list(durations.train_s)) == ([1.0], [3.0])
    assert (durations.groups_per_step, durations.groups_per_rollout) == (8, 8)
    assert (durations.kept, durations.fills_batch) == (0.75, True)
    assert recording.shares.trainer_idle == pytest.approx(10 / 14)


def test_an_asynchronous_step_does_not_score_the_batch_again():
    recording = recording_of(synchronous())
    slow_training = replace(recording.durations, rollouts_s=[0.0], kept=1.0)
    recording = replace(recording, durations=slow_training)
    assert recording.with_setting(Setting(1, 1, 0)).step_s == pytest.approx(1 + 3)
    assert recording.with_setting(Setting(1, 1, 1)).step_s == pytest.approx(1 + 2)


@pytest.mark.parametrize("missing", ["grpo.step", "grpo.rollout", "trained"])
def test_an_unusable_recording_is_refused(missing):
    records = asynchronous()
    records.spans = [span for span in records.spans if span.name != missing]
    records.events = [event for event in records.events if event.name != missing]
    with pytest.raises(TrainerError, match=r"no span grpo\.step|no finished rollout"):
        recording_of(records)
