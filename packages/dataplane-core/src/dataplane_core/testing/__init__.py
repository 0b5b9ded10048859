"""Contract tests as pytest classes, from which authors of adapters derive.

A subclass provides two fixtures and inherits every test::

    from dataplane_core.testing import DataPlaneClientContract

    class TestMyClient(DataPlaneClientContract):
        @pytest.fixture
        def client(self):
            with MyClient(CONFIG) as client:
                yield client

        @pytest.fixture
        def peer(self, client):
            ...  # a second client of the same store, preferably in another process

`LeaseContract`, `NamedClaimContract`, `BackpressureContract`, `OriginContract`,
`InspectionContract` and `ClaimOrderContract` each test a capability that a client may lack.
`MinimalClient` is for tests of layers that use clients. Needs the extra
``dataplane-core[testing]``.
"""

import pytest

import dataplane_core.tensors  # noqa: F401  # first: its error names the extra

for _module in (
    "claim_order",
    "claims",
    "columns",
    "hostile",
    "inspection",
    "lease_waits",
    "leases",
    "machine",
    "origins",
    "storage",
):
    pytest.register_assert_rewrite(f"{__name__}.{_module}")

from dataplane_core.testing.claim_order import ClaimOrderContract  # noqa: E402
from dataplane_core.testing.claims import ClaimContract  # noqa: E402
from dataplane_core.testing.columns import ColumnContract  # noqa: E402
from dataplane_core.testing.hostile import HostileContract  # noqa: E402
from dataplane_core.testing.inspection import InspectionContract  # noqa: E402
from dataplane_core.testing.lease_waits import NamedClaimContract  # noqa: E402
from dataplane_core.testing.leases import BackpressureContract, LeaseContract  # noqa: E402
from dataplane_core.testing.machine import StateMachineContract  # noqa: E402
from dataplane_core.testing.minimal import MinimalClient  # noqa: E402
from dataplane_core.testing.origins import OriginContract  # noqa: E402
from dataplane_core.testing.storage import StorageContract  # noqa: E402


class DataPlaneClientContract(
    StorageContract, ColumnContract, ClaimContract, HostileContract, StateMachineContract
):
    """Contract of every client, whatever its capabilities."""


__all__ = [
    "BackpressureContract",
    "ClaimOrderContract",
    "DataPlaneClientContract",
    "InspectionContract",
    "LeaseContract",
    "MinimalClient",
    "NamedClaimContract",
    "OriginContract",
]
