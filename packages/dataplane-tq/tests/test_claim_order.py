"""Contract of the claim order on TransferQueue: the store's owner configures it."""

from collections.abc import Iterator

import pytest
from queue_setup import CONFIG

from dataplane_core import DataPlaneClient
from dataplane_core.testing import ClaimOrderContract
from dataplane_tq import TQDataPlaneClient


@pytest.fixture(scope="module")
def owner(cluster: None) -> Iterator[TQDataPlaneClient]:
    with TQDataPlaneClient({**CONFIG, "claim_order": ClaimOrderContract.claim_order}) as client:
        yield client


class TestClaimOrder(ClaimOrderContract):
    @pytest.fixture
    def client(self, owner: TQDataPlaneClient) -> DataPlaneClient:
        return owner

    @pytest.fixture
    def peer(self, other_process: DataPlaneClient) -> DataPlaneClient:
        return other_process
