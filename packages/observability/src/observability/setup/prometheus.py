"""The endpoint that Prometheus scrapes.

The server of prometheus_client is not used: it holds every idle connection and its thread until the
process ends.
"""

from __future__ import annotations

import threading

from prometheus_client import CollectorRegistry, MetricsHandler

from observability.bounded_http import BoundedHandler, BoundedServer

MAX_CONNECTIONS = 32
_MAX_REQUEST_S = 5.0
"""Maximum time to receive a request."""
_MAX_RESPONSE_S = 30.0
"""Maximum time to send a part of the response."""
_SHUTDOWN_POLL_S = 0.1


def scrape_server(host: str, port: int, registry: CollectorRegistry) -> BoundedServer:
    """Start a server that answers every path with the metrics of a registry.

    Raises:
        OSError: the server cannot listen on the address.
    """
    base: type[MetricsHandler] = MetricsHandler.factory(registry)

    class Handler(BoundedHandler, base):  # type: ignore[misc, valid-type]  # created at run time
        headers_s = _MAX_REQUEST_S

        def do_GET(self) -> None:  # noqa: N802  # the base's name
            """Answer with the metrics."""
            self.server.mark_busy(self.connection)
            self.connection.settimeout(_MAX_RESPONSE_S)
            super().do_GET()

        def log_error(self, format: str, *args: object) -> None:  # noqa: A002  # the base's name
            """Log a malformed or late request without its text, which may have secrets."""
            self.server.log.warn("invalid_request", self.client_address[0])

    server = BoundedServer(host, port, Handler, max_connections=MAX_CONNECTIONS)
    threading.Thread(
        target=server.serve_forever, args=(_SHUTDOWN_POLL_S,), name="prometheus-scrape", daemon=True
    ).start()
    return server
