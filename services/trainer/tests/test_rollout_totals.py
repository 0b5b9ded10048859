"""A step's rollout metrics are those of all its samples, however many batches they came in."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_trainer.rollout_totals import RolloutTotals
from rollout_actor.conversation import Conversation, TurnRecord
from rollout_actor.metrics import rollout_metrics

turns = st.builds(TurnRecord, st.integers(0, 9), st.integers(0, 9), st.floats(0, 1))
conversations = st.builds(
    Conversation,
    task=st.just("t"),
    turns=st.just([]),
    env_info=st.none(),
    stop_strings=st.none(),
    media=st.just({}),
    truncated=st.booleans(),
    terminated=st.booleans(),
    history=st.lists(turns, min_size=1, max_size=3),
)


@given(st.lists(conversations, min_size=1, max_size=8), st.data())
def test_the_split_into_batches_does_not_matter(rows, data):
    cuts = sorted({0, len(rows), *data.draw(st.lists(st.integers(0, len(rows))))})
    totals = RolloutTotals()
    for start, stop in pairwise(cuts):
        batch = rows[start:stop]
        generated = sum(turn.generated for row in batch for turn in row.history)
        told = {"tokens": generated, "seconds": 0.5 * len(batch)}
        totals.add(len(batch), rollout_metrics(batch), told)
    metrics = totals.metrics
    generated = sum(turn.generated for row in rows for turn in row.history)
    assert metrics.pop("tokens_per_s") == pytest.approx(2 * generated / len(rows))
    whole = rollout_metrics(rows)
    assert metrics == pytest.approx({name: whole[name] for name in metrics})
    assert {"mean_gen_tokens_per_sample", "max_gen_tokens_per_sample"} <= metrics.keys()
    assert {"truncation_rate", "avg_turns_per_sample"} <= metrics.keys()


def test_a_back_end_that_tells_nothing_has_no_rate():
    totals = RolloutTotals()
    assert totals.metrics["tokens_per_s"] == 0
    totals.add(1, rollout_metrics([]), None)
    assert totals.metrics["tokens_per_s"] == 0
