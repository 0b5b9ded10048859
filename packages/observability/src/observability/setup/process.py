"""`setup`: creates a `Telemetry`, one at a time in a process; a forked child starts without one.

The import of this module is cheap and needs no SDK. A call of `setup` needs the SDK.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING

from observability.setup.settings import Arguments, AttributeValue

if TYPE_CHECKING:
    from observability.setup.telemetry import Telemetry

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

    Separate threads export batches by OTLP over HTTP with protobuf. An omitted argument is taken
    from the standard ``OTEL_*`` variables. Of traces, logs and metrics, only those with
    an endpoint are recorded. The variables ``OTEL_SDK_DISABLED=true`` and
    ``OTEL_{TRACES,LOGS,METRICS}_EXPORTER=none`` disable export despite arguments.

    Telemetry never makes the program fail or block. If the collector is down, is slow or rejects
    requests, or if the endpoint is not a URL, items may be dropped. `Telemetry.counts` counts
    dropped items, and each kind of trouble is logged once. What the SDK logs with the logger
    ``opentelemetry`` becomes such a warning too. One export takes at most 3 s, unless
    OTEL_EXPORTER_OTLP_TIMEOUT, or the variable of a signal, is set.

    Queued items are exported at exit and on SIGTERM. The signal handler is installed only if
    `setup` is called in the main thread. After the export it calls the previous handler. A forked
    child exports nothing until it calls `setup`.

    Args:
        service_name: ``service.name`` of the resource; default OTEL_SERVICE_NAME.
        instance: ``service.instance.id`` of the resource, for example the rank.
        run_id: ``rl.run_id`` of the resource.
        endpoint: base URL of the collector for all signals, for example ``http://127.0.0.1:4318``.
        attributes: further attributes of the resource.
        prometheus_port: port of the endpoint that Prometheus scrapes; 0 is a free port. The host is
            OTEL_EXPORTER_PROMETHEUS_HOST, by default loopback.
        sample_ratio: fraction of traces that are recorded, 0 to 1; default OTEL_TRACES_SAMPLER.
        export_interval_s: seconds between exports of every signal; default OTEL_BSP_SCHEDULE_DELAY,
            OTEL_BLRP_SCHEDULE_DELAY and OTEL_METRIC_EXPORT_INTERVAL.
        shutdown_timeout_s: maximum wait in seconds at shutdown and at exit; on SIGTERM it is half
            a second longer.

    Returns:
        The telemetry of this process. A further call with equal arguments returns the same object.

    Raises:
        ImportError: the SDK is not installed.
        RuntimeError: telemetry with other arguments is set up and was not shut down.
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
        from observability.setup.telemetry import Telemetry
    except ModuleNotFoundError as error:
        raise ImportError(
            f"observability.setup needs the OpenTelemetry SDK ({error.name} is missing): "
            "install the extra observability[sdk]"
        ) from error
    with _lock:
        if _current is not None and not _current[1].shutdown_began:
            current_arguments, telemetry = _current
            if current_arguments == arguments:
                return telemetry
            changed = [
                each.name
                for each in fields(Arguments)
                if getattr(current_arguments, each.name) != getattr(arguments, each.name)
            ]
            raise RuntimeError(
                f"observability.setup was called before with another {', '.join(changed)}; "
                "call shutdown() on the first telemetry before you set up another"
            )
        telemetry = Telemetry(arguments)
        _current = arguments, telemetry
        return telemetry


def _after_fork() -> None:
    """Detach a forked child from the parent's telemetry, so that it can set up its own."""
    global _current, _lock
    _lock = threading.Lock()
    if _current is None:
        return
    from observability.setup import providers

    providers.remove_providers()
    _current[1].reset_after_fork()
    _current = None


os.register_at_fork(after_in_child=_after_fork)
