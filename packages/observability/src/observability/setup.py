"""`setup`: spans, lifecycle events and metrics leave this process as OTLP.

Importing this module is cheap and needs no SDK; calling `setup` does.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING

from observability._setup_counts import Counts, Signal
from observability._setup_settings import Arguments, AttributeValue

if TYPE_CHECKING:
    from observability._setup_telemetry import Telemetry

__all__ = ["Counts", "Signal", "Telemetry", "setup"]

_lock = threading.Lock()
_current: tuple[Arguments, Telemetry] | None = None


def setup(
    service_name: str | None = None,
    *,
    instance: str | None = None,
    run_id: str | None = None,
    endpoint: str | None = None,
    attributes: Mapping[str, AttributeValue] | None = None,
    prometheus_port: int | None = None,
    sample_ratio: float | None = None,
    export_interval_s: float | None = None,
    shutdown_timeout_s: float = 5.0,
) -> Telemetry:
    """Set up tracing, lifecycle events and metrics of this process, once.

    What is not given is read from the standard ``OTEL_*`` variables; what is given wins over them,
    except that ``OTEL_SDK_DISABLED=true`` and ``OTEL_{TRACES,LOGS,METRICS}_EXPORTER=none`` switch
    off whatever is given. Export is OTLP over HTTP with protobuf, in batches, from threads of its
    own. A signal without an endpoint has no exporter and no provider: its API calls do nothing and
    nothing is recorded, which is the case of all three with neither arguments nor variables.

    Nothing here makes the program fail or wait. A collector that is down, slow or refuses, or an
    endpoint that is no URL, costs what was meant for it, counted by `Telemetry.counts`, and one
    warning. What OpenTelemetry writes to the standard logger ``opentelemetry`` is taken over for
    that. One export may take 3 s (``OTEL_EXPORTER_OTLP_TIMEOUT``).

    What is queued is exported at exit and on SIGTERM; the handler is installed if this is called
    in the main thread, and passes the signal on to the one before it. A forked child is silent
    until it calls `setup` itself.

    Args:
        service_name: ``service.name``; else OTEL_SERVICE_NAME.
        instance: ``service.instance.id``, the rank for example.
        run_id: ``rl.run_id``.
        endpoint: base URL of a collector, ``http://127.0.0.1:4318`` for example, of all signals.
        attributes: further attributes of the resource.
        prometheus_port: serve metrics for Prometheus on this port, 0 for a free one, on
            OTEL_EXPORTER_PROMETHEUS_HOST or else on loopback.
        sample_ratio: fraction of traces that are recorded, 0 to 1; else OTEL_TRACES_SAMPLER.
        export_interval_s: seconds between exports of every signal; else OTEL_BSP_SCHEDULE_DELAY,
            OTEL_BLRP_SCHEDULE_DELAY and OTEL_METRIC_EXPORT_INTERVAL.
        shutdown_timeout_s: longest wait in seconds at shutdown, at exit and on SIGTERM.

    Returns:
        The telemetry of this process: the same as before if called again with equal arguments.

    Raises:
        ImportError: the SDK is not installed.
        RuntimeError: it was called before with other arguments, and not shut down since.
        ValueError: a number is out of its range.
    """
    global _current
    arguments = Arguments(
        service_name=service_name,
        instance=instance,
        run_id=run_id,
        endpoint=endpoint,
        attributes=tuple(sorted((attributes or {}).items())),
        prometheus_port=prometheus_port,
        sample_ratio=sample_ratio,
        export_interval_s=export_interval_s,
        shutdown_timeout_s=shutdown_timeout_s,
    )
    arguments.check()
    try:
        from observability._setup_telemetry import Telemetry
    except ModuleNotFoundError as error:
        raise ImportError(
            f"observability.setup needs the OpenTelemetry SDK ({error.name} is missing), "
            "which the extra observability[sdk] brings"
        ) from error
    with _lock:
        if _current is not None and not _current[1].ended:
            before, telemetry = _current
            if before == arguments:
                return telemetry
            names = [each.name for each in fields(Arguments)]
            other = [name for name in names if getattr(before, name) != getattr(arguments, name)]
            raise RuntimeError(
                f"observability.setup was called before with another {', '.join(other)}; "
                "a process has one: call shutdown() on what the first call returned"
            )
        telemetry = Telemetry(arguments)
        _current = arguments, telemetry
        return telemetry


def __getattr__(name: str) -> object:
    """`Telemetry`, which needs the SDK, when it is asked for."""
    if name != "Telemetry":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from observability import _setup_telemetry

    return _setup_telemetry.Telemetry


def _after_fork() -> None:
    """The child shares nothing with the exporters of its parent, and may set up its own."""
    global _current, _lock
    _lock = threading.Lock()
    if _current is None:
        return
    from observability import _setup_globals

    _setup_globals.silence()
    _current[1].disown()
    _current = None


os.register_at_fork(after_in_child=_after_fork)
