"""A rollout that fills the samples of a claim keeps their ids; the lease fences its put."""

import pytest
import torch
from rollout_doubles import DP_CFG, Adder, batch_of
from tensordict import TensorDict

from dataplane_core import (
    InMemoryDataPlaneClient,
    InvalidRequestError,
    KVBatchMeta,
    LeaseLostError,
)

IDS = ["p7_g0", "p7_g1"]


@pytest.fixture
def leasing(store):
    """A client of the actor's store that claims with leases; the partition holds two prompts."""
    client = InMemoryDataPlaneClient(DP_CFG | {"claim_lease_s": 1000.0}, bootstrap=False)
    client.register_partition("prompts", ["prompt"], 2, ["generate", "train"])
    client.put_samples(IDS, "prompts", TensorDict({"prompt": torch.ones(2)}, [2]))
    return client


def test_a_rollout_fills_the_claimed_samples(actor_of, leasing):
    claim = leasing.claim_meta("prompts", "generate", ["prompt"], 2, sample_ids=IDS[::-1])
    meta, *_ = actor_of(Adder()).rollout_to_tq(
        batch_of(["1+2=", "2+2="]), partition_id="prompts", claim=claim
    )
    assert meta.sample_ids == IDS[::-1]
    leasing.acknowledge(claim)
    ready = leasing.claim_meta("prompts", "train", ["prompt", "input_ids"], 2)
    assert sorted(ready.sample_ids) == IDS


def test_a_rollout_under_a_lost_lease_writes_nothing(actor_of, leasing):
    claim = leasing.claim_meta("prompts", "generate", ["prompt"], 2)
    leasing.release(claim)
    leasing.claim_meta("prompts", "generate", ["prompt"], 2)  # by another generator
    with pytest.raises(LeaseLostError):
        actor_of(Adder()).rollout_to_tq(batch_of(["1+2="] * 2), partition_id="prompts", claim=claim)
    samples = leasing.inspector.list_samples("prompts")
    assert [sorted(sample.fields) for sample in samples] == [["prompt"]] * 2


def test_a_failed_rollout_leaves_the_claimed_samples(actor_of, leasing):
    class Failing(Adder):
        def get_logger_metrics(self):
            raise OSError("no metrics")

    claim = leasing.claim_meta("prompts", "generate", ["prompt"], 2)
    with pytest.raises(OSError, match="no metrics"):
        actor_of(Failing()).rollout_to_tq(
            batch_of(["1+2="] * 2), partition_id="prompts", claim=claim
        )
    leasing.release(claim)
    assert leasing.claim_meta("prompts", "generate", ["prompt"], 2).sample_ids == IDS


def test_a_claim_that_does_not_fit_is_refused_before_generation(actor_of, leasing):
    claim = leasing.claim_meta("prompts", "generate", ["prompt"], 2)
    adder = Adder()
    with pytest.raises(InvalidRequestError, match="a claim of 2 samples for 1 rows"):
        actor_of(adder).rollout_to_tq(batch_of(["1+2="]), partition_id="prompts", claim=claim)
    with pytest.raises(InvalidRequestError, match=r"of partition 'prompts'; expected .*'train'"):
        actor_of(adder).rollout_to_tq(batch_of(["1+2="] * 2), partition_id="train", claim=claim)
    unleased = KVBatchMeta("prompts", "generate", IDS)
    with pytest.raises(InvalidRequestError, match="carries no lease"):
        actor_of(adder).rollout_to_tq(
            batch_of(["1+2="] * 2), partition_id="prompts", claim=unleased
        )
    assert adder.events == []
    assert leasing.inspector.list_samples("prompts")[0].fields == ("prompt",)
