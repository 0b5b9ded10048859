"""Observability of a data plane: middleware, trace context across actors, and setup.

Only `setup` needs an OpenTelemetry SDK: the extra ``observability[sdk]``.
"""

from __future__ import annotations

from dataplane_core.telemetry import attached, extract, inject, span, step_context
from observability.actors import TracedHandle, traced
from observability.middleware.instruments import InstrumentedDataPlaneClient
from observability.middleware.lifecycle import LifecycleDataPlaneClient, emit
from observability.middleware.meters import MeterDataPlaneClient, record_trained
from observability.middleware.metrics import MetricsDataPlaneClient, log_event
from observability.middleware.observed_client import ObservedClient
from observability.middleware.operation import Observer, Operation
from observability.middleware.tracing import TracingDataPlaneClient
from observability.middleware.waits import PendingCall, waits
from observability.runs import record_run
from observability.samples import record_sample_text, record_samples
from observability.setup import setup
from observability.step_metrics import record_step_metrics

__all__ = [
    "InstrumentedDataPlaneClient",
    "LifecycleDataPlaneClient",
    "MeterDataPlaneClient",
    "MetricsDataPlaneClient",
    "ObservedClient",
    "Observer",
    "Operation",
    "PendingCall",
    "TracedHandle",
    "TracingDataPlaneClient",
    "attached",
    "emit",
    "extract",
    "inject",
    "log_event",
    "record_run",
    "record_sample_text",
    "record_samples",
    "record_step_metrics",
    "record_trained",
    "setup",
    "span",
    "step_context",
    "traced",
    "waits",
]
