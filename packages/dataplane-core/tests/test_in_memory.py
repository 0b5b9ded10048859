"""The in-memory client keeps the whole contract."""

from collections.abc import Iterator

import pytest

from dataplane_core import ConfigError, DataPlaneClient, InMemoryDataPlaneClient
from dataplane_core.testing import (
    BackpressureContract,
    DataPlaneClientContract,
    InspectionContract,
    LeaseContract,
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


class TestInMemoryLeases(MakeInMemory, LeaseContract):
    pass


class TestInMemoryBackpressure(MakeInMemory, BackpressureContract):
    pass


def test_attaching_without_an_open_store_is_refused():
    InMemoryDataPlaneClient().close()
    with pytest.raises(ConfigError, match="no open store"):
        InMemoryDataPlaneClient(bootstrap=False)


def test_an_attached_client_that_closes_takes_nothing_down():
    with InMemoryDataPlaneClient() as owner:
        owner.register_partition("train", ["x"], 1, ["train"])
        InMemoryDataPlaneClient(bootstrap=False).close()
        assert owner.check_consumption_status("train", ["train"]) is False
