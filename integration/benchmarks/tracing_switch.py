"""What the tracing benchmark does inside each process of a run: trace or not, and watch the cost.

Every one of those processes imports this module, so it imports little.
"""

from __future__ import annotations

import sys
from typing import Any  # Any: attributes of actors, and what stands in for a tracer

from integration.benchmarks import tracing_inside
from integration.benchmarks.tracing_inside import Spent
from opentelemetry._logs import NoOpLoggerProvider
from opentelemetry.metrics import NoOpMeterProvider
from opentelemetry.trace import NoOpTracer

from dataplane_core import DataPlaneClient, telemetry
from observability import ObservedClient, lifecycle, meters

_CLIENTS = ("_client", "_dp_client")
_OBSERVED: dict[str, Any] = {}
_SILENT = NoOpLoggerProvider()


def switch(actor: object, *, traced: bool) -> None:
    """Give this process what a traced one has, or an untraced one.

    Only the SDK's sleeping threads stay. The observed client is kept aside meanwhile.
    """
    if not _OBSERVED:
        _OBSERVED["tracer"] = telemetry.tracer
        _OBSERVED["loggers"] = lifecycle.get_logger_provider
        _OBSERVED["meters"] = meters.get_meter_provider
        _OBSERVED.update((name, getattr(actor, name)) for name in _CLIENTS if hasattr(actor, name))
    telemetry.tracer = _OBSERVED["tracer"] if traced else NoOpTracer  # type: ignore[assignment]
    refit: Any = sys.modules.get("refit_mx.spans")  # a process without weights does not import it
    if refit is not None:
        real = _OBSERVED.setdefault("refit_tracer", refit.tracer)
        refit.tracer = real if traced else NoOpTracer
    lifecycle.get_logger_provider = _OBSERVED["loggers"] if traced else lambda: _SILENT
    meters.get_meter_provider = _OBSERVED["meters"] if traced else NoOpMeterProvider
    for name in _CLIENTS:
        if name in _OBSERVED:
            setattr(actor, name, _OBSERVED[name] if traced else bare(_OBSERVED[name]))


def bare(client: DataPlaneClient) -> DataPlaneClient:
    """The client below those that observe it."""
    while isinstance(client, ObservedClient):
        client = client.inner
    return client


def watch(_actor: object = None) -> None:
    """See `tracing_inside.watch`."""
    tracing_inside.watch()


def take(_actor: object = None) -> Spent:
    """See `tracing_inside.take`."""
    return tracing_inside.take()
