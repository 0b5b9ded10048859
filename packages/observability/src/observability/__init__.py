"""Middleware that makes a data plane visible: metrics per operation."""

from observability.events import log_event
from observability.metrics import MetricsDataPlaneClient

__all__ = ["MetricsDataPlaneClient", "log_event"]
