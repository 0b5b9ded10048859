"""`InstrumentedDataPlaneClient`: spans, lifecycle events and metrics of one client, in one wrapper.

Together they ask the store once where samples come from.
"""

from __future__ import annotations

from dataplane_core import DataPlaneClient, ObservabilityConfig
from observability.lifecycle import Lifecycle
from observability.meters import Meters
from observability.operations import ObservedClient
from observability.tracing import Tracing


class InstrumentedDataPlaneClient(ObservedClient):
    """`TracingDataPlaneClient`, `LifecycleDataPlaneClient` and `MeterDataPlaneClient` in one.

    Args:
        inner: the client that does the work.
    """

    def __init__(self, inner: DataPlaneClient) -> None:
        # The span begins first and ends last, so events and metrics belong to it.
        super().__init__(inner, [Tracing(), Lifecycle(), Meters(inner)])


def wrap(client: DataPlaneClient, observability_cfg: ObservabilityConfig) -> DataPlaneClient:
    """The middleware ``instruments`` of `dataplane_core.build_data_plane_client`."""
    return InstrumentedDataPlaneClient(client)
