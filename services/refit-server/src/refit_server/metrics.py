"""Prometheus metrics of the control plane, on a port of their own.

They have counts and durations, never a name of a model, a worker or a version.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from http.server import BaseHTTPRequestHandler
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    PlatformCollector,
    ProcessCollector,
)
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from refit_mx.control.plane import ControlPlane
from refit_mx.control.records import Refusal
from refit_mx.threaded_listener import Connection, ThreadedListener

_MAX_CONNECTIONS = 32
_SHARE = 0.05
"""Of this process's file descriptors that connections may take."""
_REQUEST_S = 5.0
_NO_SERVER: Any = None  # what answers a request needs none
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
        self._listener = ThreadedListener(
            "metrics",
            host,
            port,
            serve=partial(_answer, registry),
            refusal=b"HTTP/1.0 503 Service Unavailable\r\n\r\n",
            max_connections=_MAX_CONNECTIONS,
            share=_SHARE,
            handshake_timeout_s=_REQUEST_S,
        )
        self.port = self._listener.port

    def close(self) -> None:
        """Stop."""
        self._listener.close(_REQUEST_S)


def _answer(registry: CollectorRegistry, connection: Connection) -> None:
    _Request(connection, registry)


class _Request(BaseHTTPRequestHandler):
    """One request of a connection, answered when this is made; the connection ends with it."""

    timeout = 30.0
    """For a peer to take a part of the answer."""

    def __init__(self, connection: Connection, registry: CollectorRegistry) -> None:
        self._connection = connection
        self._registry = registry
        with suppress(OSError):  # the peer is gone
            super().__init__(connection.sock, (connection.peer, 0), _NO_SERVER)

    def do_GET(self) -> None:
        self._connection.greeted()
        encode, content_type = choose_encoder(self.headers.get("Accept", ""))
        try:
            status, body = 200, encode(self._registry)
        except Refusal as refusal:  # the state cannot be kept
            status, body, content_type = 503, refusal.message.encode(), "text/plain"
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815

    def log_error(self, format: str, *values: object) -> None:  # noqa: A002 - of the base class
        self._connection.warn("sent a malformed request")

    def log_request(self, code: object = "-", size: object = "-") -> None:
        """Not logged."""


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
