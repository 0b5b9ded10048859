"""The in-memory client keeps the whole contract."""

import enum
from collections.abc import Iterator

import numpy as np
import pytest
import torch

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


class Stage(enum.IntEnum):
    EASY = 4


def test_scalars_of_numpy_and_torch_become_tags_that_any_process_can_read():
    given = {
        "input_lengths": np.int32(3),
        "reward": np.float32(0.5),
        "mean": np.float64(0.25),
        "kept": np.bool_(True),
        "task": np.str_("math"),
        "version": torch.tensor(7),
        "stage": Stage.EASY,
        "largest": 2**64 - 1,
        "nothing": None,
    }
    expected = {
        "input_lengths": 3,
        "reward": 0.5,
        "mean": 0.25,
        "kept": True,
        "task": "math",
        "version": 7,
        "stage": 4,
        "largest": 2**64 - 1,
        "nothing": None,
    }
    with InMemoryDataPlaneClient() as client:
        client.register_partition("train", ["x"], 1, ["train"])
        put = client.put_samples(["a"], "train", tags=[given])
        claimed = client.claim_meta("train", "train", [], 1)
        [state] = client.list_samples("train")
    for tags in (put.tags[0], claimed.tags[0], state.tags):
        assert tags == expected
        assert all(type(tags[name]) is type(value) for name, value in expected.items())
    assert claimed.sequence_lengths == [3]
