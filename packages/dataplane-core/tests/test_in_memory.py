"""The in-memory client fulfils the complete contract."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tensordict import TensorDict

from dataplane_core import (
    ConfigError,
    DataPlaneClient,
    InMemoryDataPlaneClient,
    PartitionNotFoundError,
    TagFilter,
)
from dataplane_core.testing import (
    BackpressureContract,
    ClaimOrderContract,
    DataPlaneClientContract,
    InspectionContract,
    LeaseContract,
    NamedClaimContract,
    OriginContract,
)


class TestInMemoryClient(DataPlaneClientContract, OriginContract, InspectionContract):
    @pytest.fixture
    def client(self) -> Iterator[DataPlaneClient]:
        with InMemoryDataPlaneClient() as client:
            yield client

    @pytest.fixture
    def peer(self, client: DataPlaneClient) -> DataPlaneClient:
        return InMemoryDataPlaneClient(bootstrap=False)

    @pytest.fixture
    def leasing(self, client: DataPlaneClient) -> DataPlaneClient:
        config = {"enabled": True, "impl": "in_memory", "claim_lease_s": 1000.0}
        return InMemoryDataPlaneClient(config, bootstrap=False)


class MakeInMemory:
    @pytest.fixture
    def make_client(self):
        clients = []

        def make(**config):
            clients.append(
                InMemoryDataPlaneClient({"enabled": True, "impl": "in_memory", **config})
            )
            return clients[-1]

        yield make
        for client in clients:
            client.close()


class TestInMemoryLeases(MakeInMemory, LeaseContract, NamedClaimContract):
    pass


class TestInMemoryBackpressure(MakeInMemory, BackpressureContract):
    pass


class TestInMemoryClaimOrder(MakeInMemory, ClaimOrderContract):
    @pytest.fixture
    def client(self, make_client) -> DataPlaneClient:
        return make_client(claim_order=self.claim_order)

    @pytest.fixture
    def peer(self, client: DataPlaneClient) -> DataPlaneClient:
        return InMemoryDataPlaneClient(bootstrap=False)


def wait_until_claim_is_blocked(client):
    deadline = time.monotonic() + 20
    while not client._store.changed._waiters:
        assert time.monotonic() < deadline, "no claim is blocked"
        time.sleep(0.001)


def test_blocked_claim_wakes_when_another_opens_assignments():
    with InMemoryDataPlaneClient() as client, ThreadPoolExecutor(1) as pool:
        client.register_partition("p", ["x", "y"], 3, ["train"])
        client.put_samples(["a", "b"], "p", TensorDict({"y": torch.ones(2)}, [2]), [{"v": 2}] * 2)
        client.put_samples(["c"], "p", tags=[{"v": 1}])
        client.claim_meta("p", "train", ["y"], 1, dp_rank=0, dp_world=2)
        where = [TagFilter("v", "<=", 2)]
        waiting = pool.submit(client.claim_meta, "p", "train", ["y"], 1, where=where, timeout_s=20)
        wait_until_claim_is_blocked(client)
        # This claim opens the assignment of rank 1, and is then blocked: the sample lacks z.
        other = [TagFilter("v", "==", 2)]
        assert client.claim_meta("p", "train", ["z"], 1, where=other, timeout_s=5).sample_ids == []
        assert waiting.result(5).sample_ids == ["b"]


def test_blocked_put_does_not_enter_a_newer_partition():
    config = {"enabled": True, "impl": "in_memory", "storage_capacity": 1}
    fields = TensorDict({"x": torch.ones(1)}, [1])
    with InMemoryDataPlaneClient(config) as client, ThreadPoolExecutor(1) as pool:
        client.register_partition("p", ["x"], 1, ["train"])
        client.put_samples(["a"], "p", fields)
        stale = pool.submit(client.put_samples, ["b"], "p", fields)
        wait_until_claim_is_blocked(client)
        with client._store.changed:  # so that the put sees both at once
            client.clear_samples(None, "p")
            client.register_partition("p", ["x"], 1, ["train"])
        with pytest.raises(PartitionNotFoundError, match="registered again since the put began"):
            stale.result(20)
        assert client.claim_meta("p", "train", ["x"], 1, blocking=False).sample_ids == []


def test_attaching_without_an_open_store_is_refused():
    InMemoryDataPlaneClient().close()
    with pytest.raises(ConfigError, match="no open store"):
        InMemoryDataPlaneClient(bootstrap=False)


def test_closing_an_attached_client_keeps_the_store_open():
    with InMemoryDataPlaneClient() as owner:
        owner.register_partition("train", ["x"], 1, ["train"])
        InMemoryDataPlaneClient(bootstrap=False).close()
        assert owner.check_consumption_status("train", ["train"]) is False


def test_tags_hold_unsigned_integers_of_64_bits():
    with InMemoryDataPlaneClient() as client:
        client.register_partition("train", ["x"], 1, ["train"])
        client.put_samples(["a"], "train", tags=[{"largest": 2**64 - 1}])
        assert client.claim_meta("train", "train", [], 1).tags == [{"largest": 2**64 - 1}]


def test_attaching_with_another_value_than_the_store_is_refused():
    own = {"enabled": True, "impl": "in_memory"}
    with InMemoryDataPlaneClient({**own, "storage_capacity": 8}):
        for agreeing in (own, {**own, "storage_capacity": 8, "ack_timeout_ms": 5}):
            InMemoryDataPlaneClient(agreeing, bootstrap=False).close()
        other = {**own, "storage_capacity": 9, "claim_order": "builtins:len"}
        with pytest.raises(ConfigError, match=r"storage_capacity: found 9; expected 8.*'builtins"):
            InMemoryDataPlaneClient(other, bootstrap=False)
