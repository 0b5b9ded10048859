"""Contract suite on TransferQueue, with one attached client here and one in another process."""

from collections.abc import Callable, Iterator

import pytest

from dataplane_core import DataPlaneClient
from dataplane_core.testing import (
    DataPlaneClientContract,
    InspectionContract,
    LeaseContract,
    NamedClaimContract,
    OriginContract,
)
from dataplane_tq import TQDataPlaneClient
from dataplane_tq.storage import BACKENDS

Attach = Callable[..., TQDataPlaneClient]
QUICK = ("packed", "simple")


@pytest.fixture(
    scope="module",
    params=[
        *QUICK,
        # test_mirror.py and test_key_value_backends.py cover what differs in these backends.
        *(
            pytest.param(name, marks=[pytest.mark.slow, pytest.mark.long])
            for name in ("unmirrored", *sorted(BACKENDS.keys() - {*QUICK}))
        ),
    ],
)
def backend(request: pytest.FixtureRequest, require_backend: Callable[[str], str]) -> str:
    return require_backend(request.param)


class Attached:
    """Attached client that many tests share, because attaching to Mooncake takes a second."""

    def __init__(self, attach: Attach) -> None:
        self._attach = attach
        self.client = attach()

    def open(self) -> TQDataPlaneClient:
        """Return the client; a new one if a test closed it."""
        if self.client.closed:
            self.client = self._attach()
        return self.client


@pytest.fixture(scope="module")
def attached(attach: Attach) -> Iterator[Attached]:
    attached = Attached(attach)
    yield attached
    attached.client.close()


@pytest.fixture(scope="module")
def attached_with_leases(attach: Attach) -> Iterator[DataPlaneClient]:
    with attach(claim_lease_s=1000.0) as client:
        yield client


class TestTransferQueue(DataPlaneClientContract, OriginContract, InspectionContract):
    walk_examples = 12
    form_examples = 8
    walk_steps = 15

    @pytest.fixture
    def client(self, attached: Attached) -> DataPlaneClient:
        return attached.open()

    @pytest.fixture
    def peer(self, client: DataPlaneClient, other_process: DataPlaneClient) -> DataPlaneClient:
        return other_process

    @pytest.fixture
    def leasing(self, attached_with_leases: DataPlaneClient) -> DataPlaneClient:
        return attached_with_leases

    @pytest.fixture
    def reports_bytes(self, backend: str) -> bool:
        return backend in ("packed", "unmirrored")


class TestLeases(LeaseContract, NamedClaimContract):
    @pytest.fixture
    def make_client(self, attach: Attach) -> Iterator[Callable]:
        """Return a builder of clients; each has its own lease duration, so one store serves all."""
        clients = []

        def make(**changes: float) -> DataPlaneClient:
            clients.append(attach(**changes))
            return clients[-1]

        yield make
        for client in clients:
            client.clear_samples(None, "train", force=True)
            client.close()
