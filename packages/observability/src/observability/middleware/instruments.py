"""`InstrumentedDataPlaneClient`: spans, lifecycle events and metrics of a client in one wrapper.

All three share one query to the store for the origins of samples.
"""

from __future__ import annotations

from dataplane_core import DataPlaneClient, ObservabilityConfig
from observability.middleware.lifecycle import Lifecycle
from observability.middleware.meters import Meters
from observability.middleware.observed_client import ObservedClient
from observability.middleware.tracing import Tracing


class InstrumentedDataPlaneClient(ObservedClient):
    """A client that combines tracing, lifecycle events and metrics.

    Args:
        inner: the client that does the work.
    """

    def __init__(self, inner: DataPlaneClient) -> None:
        # The span begins first and ends last, so events and metrics carry its context.
        super().__init__(inner, [Tracing(), Lifecycle(), Meters(inner)])


def wrap(client: DataPlaneClient, observability_cfg: ObservabilityConfig) -> DataPlaneClient:
    """Wrap a client: the middleware ``instruments`` of `dataplane_core.build_data_plane_client`."""
    return InstrumentedDataPlaneClient(client)
