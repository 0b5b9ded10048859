"""What a failure of the back end's last calls leaves behind, and what is said of it."""

import pytest
from rollout_doubles import DP_CFG, Adder, batch_of

from dataplane_core import InMemoryDataPlaneClient, UnavailableError


class FailingTail(Adder):
    """An `Adder` whose call of the name ``fails`` raises; ``meanwhile`` is called before."""

    def __init__(self, fails, meanwhile=lambda: None):
        super().__init__()
        self.fails = fails
        self.meanwhile = meanwhile

    def _called(self, name):
        if name == self.fails:
            self.meanwhile()
            raise OSError(f"no {name}")

    def get_logger_metrics(self):
        self._called("metrics")
        return super().get_logger_metrics()

    def finish_generation(self):
        super().finish_generation()
        self._called("finish")


@pytest.mark.parametrize("fails", ["finish", "metrics"])
@pytest.mark.parametrize("lease", [{}, {"claim_lease_s": 1000.0}], ids=["final", "leased"])
def test_a_failure_after_the_put_leaves_nothing_for_a_retry_to_double(
    actor_of, store, fails, lease
):
    consumer = InMemoryDataPlaneClient(DP_CFG | lease, bootstrap=False)
    claimed = []

    def claim():
        claimed.append(consumer.claim_meta("train", "train", ["input_ids"], 1, blocking=False))

    actor = actor_of(FailingTail(fails, claim))
    with pytest.raises(OSError, match=f"no {fails}") as caught:
        actor.rollout_to_tq(batch_of(["1+2="] * 2), partition_id="train")
    assert not hasattr(caught.value, "__notes__")
    assert claimed[0].size == 1
    assert store.list_samples("train") == []
    actor.policy_generation.fails = None
    meta, *_ = actor.rollout_to_tq(batch_of(["1+2="] * 2), partition_id="train")
    assert [sample.sample_id for sample in store.list_samples("train")] == meta.sample_ids


def test_samples_that_cannot_be_cleared_after_a_failure_are_told(actor_of, store, monkeypatch):
    def away(self, sample_ids, partition_id, **options):
        raise UnavailableError("away")

    monkeypatch.setattr(InMemoryDataPlaneClient, "clear_samples", away)
    with pytest.raises(OSError, match="no metrics") as caught:
        actor_of(FailingTail("metrics")).rollout_to_tq(batch_of(["1+2="]), partition_id="train")
    assert caught.value.__notes__ == [
        "the 1 samples put into partition 'train' may still be there: UnavailableError: away"
    ]


def test_a_back_end_that_cannot_finish_either_does_not_hide_why_generation_failed(actor_of):
    class Broken(FailingTail):
        def generate(self, data, *, greedy):
            raise MemoryError("no room")

    with pytest.raises(MemoryError, match="no room") as caught:
        actor_of(Broken("finish")).rollout_to_tq(batch_of(["1+2="]), partition_id="train")
    assert caught.value.__notes__ == ["finish_generation failed as well: OSError: no finish"]
