"""`InstrumentedDataPlaneClient`: spans, lifecycle events and metrics of a client in one wrapper.

The three share one query to the store for the origins of an operation's samples.
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
        inner: the wrapped client.
    """

    def __init__(self, inner: DataPlaneClient) -> None:
        # `Tracing` begins first and ends last, so that events and metrics have the span's context.
        super().__init__(inner, [Tracing(), Lifecycle(), Meters(inner)])


def wrap(client: DataPlaneClient, observability_cfg: ObservabilityConfig) -> DataPlaneClient:
    """Wrap a client: the middleware ``instruments`` of `dataplane_core.build_data_plane_client`."""
    return InstrumentedDataPlaneClient(client)
