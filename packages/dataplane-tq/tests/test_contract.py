"""TransferQueue keeps the contract, between an attached client here and one in another process."""

from collections.abc import Callable, Iterator

import pytest

from dataplane_core import DataPlaneClient
from dataplane_core.testing import DataPlaneClientContract, LeaseContract
from dataplane_tq import TQDataPlaneClient


@pytest.fixture(scope="module", params=["packed", "simple"])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


class TestTransferQueue(DataPlaneClientContract):
    walk_examples = 12
    walk_steps = 15

    @pytest.fixture
    def client(self, owner: TQDataPlaneClient, config: dict) -> Iterator[DataPlaneClient]:
        with TQDataPlaneClient(config, bootstrap=False) as client:
            yield client

    @pytest.fixture
    def peer(self, client: DataPlaneClient, other_process: DataPlaneClient) -> DataPlaneClient:
        return other_process


class TestLeases(LeaseContract):
    @pytest.fixture
    def make_client(self, owner: TQDataPlaneClient, config: dict) -> Iterator[Callable]:
        """A lease's length belongs to the client that claims, so one store serves all."""
        clients = []

        def make(**changes: float) -> DataPlaneClient:
            clients.append(TQDataPlaneClient({**config, **changes}, bootstrap=False))
            return clients[-1]

        yield make
        for client in clients:
            client.clear_samples(None, "train", force=True)
            client.close()
