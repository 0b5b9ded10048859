"""Prometheus metrics of the control plane, on a port of their own.

They have counts and durations, never a name of a model, a worker or a version.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    start_http_server,
)
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from refit_mx.control.plane import ControlPlane

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 2.0, 10.0)


class Metrics:
    """What a server tells Prometheus. `observe` is the control plane's observer of calls."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        self._calls = Counter(
            "refit_control_calls",
            "Calls that were answered, by method and status code.",
            ["method", "code"],
            registry=self._registry,
        )
        self._seconds = Histogram(
            "refit_control_call_seconds",
            "How long calls took, from their request to their answer.",
            ["method"],
            buckets=_SECONDS,
            registry=self._registry,
        )

    def observe(self, method: str, code: str, seconds: float) -> None:
        """Note a call."""
        self._calls.labels(method, code).inc()
        self._seconds.labels(method).observe(seconds)

    def watch(self, plane: ControlPlane) -> None:
        """Show how much the control plane holds, each time somebody asks."""
        self._registry.register(_Holdings(plane))

    def serve(self, host: str, port: int) -> MetricsServer:
        """Answer ``GET /metrics``.

        Raises:
            OSError: the address cannot be listened on.
        """
        return MetricsServer(host, port, self._registry)


class MetricsServer:
    """The port that Prometheus asks.

    Args:
        host: to listen on.
        port: to listen on; 0 takes a free one.
        registry: of what is shown.
    """

    def __init__(self, host: str, port: int, registry: CollectorRegistry) -> None:
        self._server, self._thread = start_http_server(port, addr=host, registry=registry)
        self.port = int(self._server.server_port)

    def close(self) -> None:
        """Stop."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Holdings(Collector):
    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane

    def collect(self) -> Iterator[Metric]:
        counts = self._plane.counts()
        versions = GaugeMetricFamily(
            "refit_control_versions", "Versions that are not forgotten, by state.", labels=["state"]
        )
        for state, number in counts.versions.items():
            versions.add_metric([state], number)
        yield versions
        workers = GaugeMetricFamily("refit_control_workers", "Live workers.", labels=["role"])
        for role, number in counts.workers.items():
            workers.add_metric([role], number)
        yield workers
        yield GaugeMetricFamily("refit_control_shards", "Shards of versions.", counts.shards)
        yield GaugeMetricFamily("refit_control_leases", "Leases on versions.", counts.leases)
        yield GaugeMetricFamily(
            "refit_control_sources", "Sources of P2pService that are READY.", counts.sources
        )
