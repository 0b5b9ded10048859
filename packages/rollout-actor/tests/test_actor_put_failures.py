"""Failures at or after the put: nothing remains, and the error is clear."""

import pytest
from rollout_doubles import DP_CFG, Adder, batch_of

from dataplane_core import (
    DP_TRAIN_FIELDS,
    ClaimTimeoutError,
    DeadlineExceededError,
    InMemoryDataPlaneClient,
    PartitionNotFoundError,
    UnavailableError,
)


class FailingAfterPut(Adder):
    """An `Adder` that raises in the call that ``fails`` names, after calling ``before``."""

    def __init__(self, fails, before=lambda: None):
        super().__init__()
        self.fails = fails
        self.before = before

    def _called(self, name):
        if name == self.fails:
            self.before()
            raise OSError(f"no {name}")

    def get_logger_metrics(self):
        self._called("metrics")
        return super().get_logger_metrics()

    def finish_generation(self):
        super().finish_generation()
        self._called("finish")


@pytest.mark.parametrize("fails", ["finish", "metrics"])
@pytest.mark.parametrize("lease", [{}, {"claim_lease_s": 1000.0}], ids=["final", "leased"])
def test_failure_after_the_put_withdraws_the_samples(actor_of, store, fails, lease):
    consumer = InMemoryDataPlaneClient(DP_CFG | lease, bootstrap=False)
    claimed = []

    def claim():
        claimed.append(consumer.claim_meta("train", "train", ["input_ids"], 1, blocking=False))

    actor = actor_of(FailingAfterPut(fails, claim))
    with pytest.raises(OSError, match=f"no {fails}") as caught:
        actor.rollout_to_tq(batch_of(["1+2="] * 2), partition_id="train")
    assert not hasattr(caught.value, "__notes__")
    assert claimed[0].size == 1
    assert store.inspector.list_samples("train") == []
    actor.policy_generation.fails = None
    meta, *_ = actor.rollout_to_tq(batch_of(["1+2="] * 2), partition_id="train")
    assert [sample.sample_id for sample in store.inspector.list_samples("train")] == meta.sample_ids


def test_claim_after_a_failure_waits_for_the_retry(actor_of, store):
    store.register_partition("two", list(DP_TRAIN_FIELDS), 2, ["train"])
    wanted = ("two", "train", ["input_ids"], 2)
    actor = actor_of(FailingAfterPut("metrics"))
    with pytest.raises(OSError, match="no metrics"):
        actor.rollout_to_tq(batch_of(["1+2="] * 2), partition_id="two")
    with pytest.raises(ClaimTimeoutError, match="2 of 2 declared samples were not put"):
        store.claim_meta(*wanted, timeout_s=0.05)
    actor.policy_generation.fails = None
    meta, *_ = actor.rollout_to_tq(batch_of(["1+2="] * 2), partition_id="two")
    assert store.claim_meta(*wanted, timeout_s=20.0).sample_ids == meta.sample_ids


def lose_answer(monkeypatch, error):
    """Make puts succeed and raise."""
    real = InMemoryDataPlaneClient.put_columns

    def put_columns(self, *args, **options):
        real(self, *args, **options)
        raise error

    monkeypatch.setattr(InMemoryDataPlaneClient, "put_columns", put_columns)


@pytest.mark.parametrize(
    "error", [DeadlineExceededError("late"), UnavailableError("away"), KeyboardInterrupt("now")]
)
def test_put_with_a_lost_answer_is_withdrawn(actor_of, store, monkeypatch, error):
    actor = actor_of()
    with monkeypatch.context() as patched:
        lose_answer(patched, error)
        with pytest.raises(type(error), match=str(error)) as caught:
            actor.rollout_to_tq(batch_of(["1+2="] * 2), partition_id="train")
    assert not hasattr(caught.value, "__notes__")
    assert store.inspector.list_samples("train") == []
    assert actor.policy_generation.events[-1] == "finish"
    meta, *_ = actor.rollout_to_tq(batch_of(["1+2="] * 2), partition_id="train")
    assert [sample.sample_id for sample in store.inspector.list_samples("train")] == meta.sample_ids


def test_a_refused_put_withdraws_nothing(actor_of, store, monkeypatch):
    withdrawn = []

    def withdraw_samples(self, sample_ids, partition_id):
        withdrawn.append(sample_ids)

    monkeypatch.setattr(InMemoryDataPlaneClient, "withdraw_samples", withdraw_samples)
    with pytest.raises(PartitionNotFoundError):
        actor_of().rollout_to_tq(batch_of(["1+2="]), partition_id="nowhere")
    assert withdrawn == []


@pytest.mark.parametrize("fails", ["metrics", None], ids=["after the put", "the put"])
def test_failed_withdrawal_is_noted_on_the_error(actor_of, store, monkeypatch, fails):
    def away(self, sample_ids, partition_id):
        raise UnavailableError("away")

    monkeypatch.setattr(InMemoryDataPlaneClient, "withdraw_samples", away)
    if fails is None:
        lose_answer(monkeypatch, OSError("no metrics"))
    with pytest.raises(OSError, match="no metrics") as caught:
        actor_of(FailingAfterPut(fails)).rollout_to_tq(batch_of(["1+2="]), partition_id="train")
    assert caught.value.__notes__ == [
        "the 1 samples put into partition 'train' may still be there: UnavailableError: away"
    ]


def test_failing_finish_does_not_hide_the_first_error(actor_of):
    class Broken(FailingAfterPut):
        def generate(self, data, *, greedy):
            raise MemoryError("no free memory")

    with pytest.raises(MemoryError, match="no free memory") as caught:
        actor_of(Broken("finish")).rollout_to_tq(batch_of(["1+2="]), partition_id="train")
    assert caught.value.__notes__ == ["finish_generation failed as well: OSError: no finish"]
