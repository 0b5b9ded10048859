"""Functions of the tracing benchmark inside each process of a run: switch tracing, time it.

Every process of the run imports this module, so it imports little. Imports internals: no public
function takes tracing out of a process.
"""

from __future__ import annotations

import sys
from typing import Any  # Any: attributes of actors, and replacements of a tracer

from integration.benchmarks import tracing_inside
from integration.benchmarks.tracing_inside import Spent
from opentelemetry._logs import NoOpLoggerProvider
from opentelemetry.metrics import NoOpMeterProvider
from opentelemetry.trace import NoOpTracer

from dataplane_core import DataPlaneClient, telemetry
from observability import ObservedClient
from observability.middleware import lifecycle, meters

_CLIENTS = ("_client", "_dp_client")
_OBSERVED: dict[str, Any] = {}
_SILENT = NoOpLoggerProvider()


def switch(actor: object, *, traced: bool) -> None:
    """Turn tracing in this process on or off.

    With tracing off, only the SDK's sleeping threads remain. The first call saves what it replaces.
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
    """Return the client inside its observing wrappers."""
    while isinstance(client, ObservedClient):
        client = client.inner
    return client


def watch(_actor: object = None) -> None:
    """Call `tracing_inside.watch`."""
    tracing_inside.watch()


def take(_actor: object = None) -> Spent:
    """Call `tracing_inside.take`."""
    return tracing_inside.take()
