"""TransferQueue keeps the contract, between an attached client here and one in another process."""

from collections.abc import Iterator

import pytest

from dataplane_core import DataPlaneClient
from dataplane_core.testing import DataPlaneClientContract
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
