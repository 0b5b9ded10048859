"""Prometheus metrics of the control plane, on a separate port.

They contain counts and durations, but no names of models, workers or versions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
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
from refit_mx.listening.threaded import Connection, ThreadedListener

_MAX_CONNECTIONS = 32
_CONNECTIONS_SHARE = 0.05
"""Fraction of this process's file descriptors that connections may use."""
REQUEST_S = 5.0
_NO_SERVER: Any = None  # requests are answered without one
_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 2.0, 10.0)


class Metrics:
    """Prometheus metrics of a server; `observe` is the control plane's observer of calls."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        self._calls = Counter(
            "refit_control_calls",
            "Answered calls, by method and status code.",
            ["method", "code"],
            registry=self._registry,
        )
        self._seconds = Histogram(
            "refit_control_call_seconds",
            "Duration of calls from request to answer.",
            ["method"],
            buckets=_SECONDS,
            registry=self._registry,
        )

    def observe(self, method: str, code: str, seconds: float) -> None:
        """Record a call."""
        self._calls.labels(method, code).inc()
        self._seconds.labels(method).observe(seconds)

    def watch(self, plane: ControlPlane) -> None:
        """Add metrics of what the control plane holds, read at each request."""
        self._registry.register(_Holdings(plane))

    def serve(self, host: str, port: int) -> ThreadedListener:
        """Serve ``GET /metrics`` until the listener is closed; port 0 picks a free one.

        Raises:
            OSError: the server cannot listen on the address.
        """
        return ThreadedListener(
            "metrics",
            host,
            port,
            serve=lambda connection: _Request(connection, self._registry),
            refusal=b"HTTP/1.0 503 Service Unavailable\r\n\r\n",
            max_connections=_MAX_CONNECTIONS,
            share=_CONNECTIONS_SHARE,
            handshake_timeout_s=REQUEST_S,
        )


class _Request(BaseHTTPRequestHandler):
    """The only request of a connection, answered on creation."""

    timeout = 30.0
    """Time limit for a peer to accept a part of the answer."""

    def __init__(self, connection: Connection, registry: CollectorRegistry) -> None:
        self._connection = connection
        self._registry = registry
        with suppress(OSError):  # the peer is gone
            super().__init__(connection.sock, (connection.peer, 0), _NO_SERVER)

    def do_GET(self) -> None:
        self._connection.mark_greeted()
        encode, content_type = choose_encoder(self.headers.get("Accept", ""))
        try:
            status, body = 200, encode(self._registry)
        except Refusal as refusal:  # the state cannot be stored
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
        """Log nothing."""


class _Holdings(Collector):
    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane

    def collect(self) -> Iterator[Metric]:
        counts = self._plane.counts()
        versions = GaugeMetricFamily(
            "refit_control_versions", "Versions by state, without forgotten ones.", labels=["state"]
        )
        for state, number in counts.versions.items():
            versions.add_metric([state], number)
        yield versions
        workers = GaugeMetricFamily("refit_control_workers", "Live workers.", labels=["role"])
        for role, number in counts.workers.items():
            workers.add_metric([role], number)
        yield workers
        yield GaugeMetricFamily("refit_control_shards", "Shards of all versions.", counts.shards)
        yield GaugeMetricFamily("refit_control_leases", "Leases on all versions.", counts.leases)
        yield GaugeMetricFamily(
            "refit_control_sources", "READY sources of P2pService.", counts.sources
        )
