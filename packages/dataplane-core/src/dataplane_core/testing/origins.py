"""Contract tests of the origins of puts, for clients with ``capabilities.origins``."""

from __future__ import annotations

import pytest
import torch

from dataplane_core import DataPlaneClient, PartitionNotFoundError
from dataplane_core.testing.storage import StoreFixtures, batch

FIRST, SECOND = "00-" + "a" * 32 + "-" + "b" * 16 + "-01", "second"


class OriginContract(StoreFixtures):
    """Contract: every client of the store can read a put's origin; origins change nothing else."""

    def test_origin_of_a_put_is_read_for_the_fields_it_wrote(
        self, client: DataPlaneClient, peer: DataPlaneClient, partition: str
    ) -> None:
        x = torch.arange(3)
        client.put_samples(["a", "b", "c"], partition, batch(3, x=x), origin=FIRST)
        peer.put_columns(["a", "b"], partition, {"y": x[:2]}, origin=SECOND)
        client.put_samples(["d"], partition, batch(1, x=x[:1]))
        assert peer.read_origins(["a", "b", "c", "d"], partition, ["x"]) == {FIRST: 3}
        assert client.read_origins(["a", "c"], partition, ["x", "y"]) == {FIRST: 2, SECOND: 1}
        assert client.read_origins(["d", "unknown"], partition, ["x", "z"]) == {}

    def test_read_returns_the_origins_of_its_fields(
        self, client: DataPlaneClient, partition: str
    ) -> None:
        x = torch.arange(3)
        client.put_samples(["a", "b", "c"], partition, batch(3, x=x), origin=FIRST)
        client.put_samples(["a"], partition, batch(1, y=x[:1]), origin=SECOND)
        origins: dict[str, int] = {}
        client.get_samples(["a", "b"], partition, ["x"], origins=origins)
        assert origins == {FIRST: 2}
        origins.clear()
        client.get_columns(["a"], partition, ["x", "y"], origins=origins)
        assert origins == {FIRST: 1, SECOND: 1}
        origins.clear()
        claimed = client.claim_meta(partition, "train", ["x"], 3, blocking=False)
        client.get_data(claimed, origins=origins)
        assert origins == {FIRST: 3}

    def test_overwriting_a_field_replaces_its_origin(
        self, client: DataPlaneClient, partition: str
    ) -> None:
        x = torch.arange(2)
        client.put_samples(["a", "b"], partition, batch(2, x=x, y=x), origin=FIRST)
        client.put_samples(["a"], partition, batch(1, x=x[:1]), origin=SECOND)
        client.put_samples(["b"], partition, batch(1, x=x[:1]))
        assert client.read_origins(["a", "b"], partition, ["x"]) == {SECOND: 1}
        assert client.read_origins(["a", "b"], partition, ["y"]) == {FIRST: 2}

    def test_origin_does_not_change_tags(self, client: DataPlaneClient, partition: str) -> None:
        tags = [{"weight_version": 3}]
        x = torch.arange(1)
        answered = client.put_samples(["a"], partition, batch(1, x=x), tags, origin=FIRST)
        client.put_samples(["a"], partition, batch(1, y=x), origin=SECOND)
        assert answered.tags == tags
        claimed = client.claim_meta(partition, "train", ["x", "y"], 1, blocking=False)
        assert claimed.tags == tags

    def test_origins_of_an_unknown_partition_are_refused(self, client: DataPlaneClient) -> None:
        with pytest.raises(PartitionNotFoundError):
            client.read_origins(["a"], "unknown", ["x"])

    def test_clearing_forgets_origins(self, client: DataPlaneClient, partition: str) -> None:
        client.put_samples(["a"], partition, batch(1, x=torch.arange(1)), origin=FIRST)
        client.clear_samples(["a"], partition)
        assert client.read_origins(["a"], partition, ["x"]) == {}
