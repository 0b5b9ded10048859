"""Contract tests of configured claim orders, for clients with ``capabilities.claim_order``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar  # Any: tags hold the caller's own primitives

import pytest
import torch

from dataplane_core import DataPlaneClient, InvalidRequestError
from dataplane_core.testing.storage import StoreFixtures, batch


def by_priority(sample_id: str, tags: Mapping[str, Any]) -> float:
    """Return the tag ``priority`` of a sample."""
    priority: float = tags["priority"]
    return priority


def put(client: DataPlaneClient, partition: str, priorities: Mapping[str, Any]) -> None:
    """Put a sample for each id, with its priority as a tag."""
    tags = [{"priority": priority} for priority in priorities.values()]
    client.put_samples(list(priorities), partition, batch(len(tags), x=torch.ones(len(tags))), tags)


class ClaimOrderContract(StoreFixtures):
    """Contract: claims take the samples with the smallest priorities first.

    The fixtures ``client`` and ``peer`` are clients of a store that was bootstrapped with
    `claim_order`.
    """

    claim_order: ClassVar[str] = f"{__name__}:{by_priority.__name__}"

    def test_equal_samples_are_claimed_in_the_order_of_first_puts(
        self, client: DataPlaneClient, peer: DataPlaneClient, partition: str
    ) -> None:
        assert client.capabilities.claim_order
        put(client, partition, {"d": 2, "c": 1, "b": 1})
        put(peer, partition, {"a": 1, "e": 1.5, "f": -1})
        put(client, partition, {"c": 1})
        assert peer.claim_meta(partition, "train", ["x"], 2).sample_ids == ["f", "c"]
        rest = client.claim_meta(partition, "train", ["x"], 8, blocking=False)
        assert rest.sample_ids == ["b", "a", "e", "d"]

    def test_group_has_the_smallest_priority_of_its_samples(
        self, client: DataPlaneClient, partition: str
    ) -> None:
        client.register_partition(partition, ["x"], 8, ["train"], grpo_group_size=2)
        put(client, partition, {"p0_g0": 5, "p0_g1": 5, "p3_g0": 9, "p3_g1": 1})
        put(client, partition, {"p2_g0": 1, "p2_g1": 1, "p1_g0": 1, "p1_g1": 8})
        claimed = client.claim_meta(partition, "train", ["x"], 8).sample_ids
        assert claimed == [f"p{group}_g{number}" for group in (3, 2, 1, 0) for number in (0, 1)]

    def test_changed_tag_changes_the_order(self, client: DataPlaneClient, partition: str) -> None:
        put(client, partition, {"a": 3, "b": 2, "c": 1})
        assert client.claim_meta(partition, "train", ["x"], 1).sample_ids == ["c"]
        put(client, partition, {"a": 0})
        assert client.claim_meta(partition, "train", ["x"], 2).sample_ids == ["a", "b"]

    def test_seed_takes_precedence(self, client: DataPlaneClient, partition: str) -> None:
        put(client, partition, {f"s{number}": number for number in range(8)})
        first, second = (
            client.claim_meta(partition, task, ["x"], 8, seed=1).sample_ids
            for task in ("logprob", "train")
        )
        assert first == second != [f"s{number}" for number in range(8)]

    @pytest.mark.parametrize("wrong", ["high", None, float("nan")])
    def test_failing_order_is_named_until_the_tag_changes(
        self, client: DataPlaneClient, partition: str, wrong: object
    ) -> None:
        put(client, partition, {"good": 1, "bad": wrong})
        with pytest.raises(InvalidRequestError, match="claim_order failed on sample 'bad'"):
            client.claim_meta(partition, "train", ["x"], 1)
        put(client, partition, {"bad": 0})
        assert client.claim_meta(partition, "train", ["x"], 2).sample_ids == ["bad", "good"]
