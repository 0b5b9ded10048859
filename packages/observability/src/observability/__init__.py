"""Middleware that makes a data plane visible, and what else it takes to trace a step.

Nothing here needs an OpenTelemetry SDK but `setup`, which needs the extra ``observability[sdk]``.
"""

from __future__ import annotations

from dataplane_core.telemetry import attached, extract, inject, span, step_context
from observability.actors import TracedHandle, traced
from observability.events import log_event
from observability.instruments import InstrumentedDataPlaneClient
from observability.lifecycle import LifecycleDataPlaneClient, emit
from observability.meters import MeterDataPlaneClient, trained
from observability.metrics import MetricsDataPlaneClient
from observability.operations import ObservedClient, Observer, Operation
from observability.setup import setup
from observability.tracing import TracingDataPlaneClient
from observability.waits import waits

__all__ = [
    "InstrumentedDataPlaneClient",
    "LifecycleDataPlaneClient",
    "MeterDataPlaneClient",
    "MetricsDataPlaneClient",
    "ObservedClient",
    "Observer",
    "Operation",
    "TracedHandle",
    "TracingDataPlaneClient",
    "attached",
    "emit",
    "extract",
    "inject",
    "log_event",
    "setup",
    "span",
    "step_context",
    "traced",
    "trained",
    "waits",
]
