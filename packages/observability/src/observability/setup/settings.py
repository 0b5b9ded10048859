"""Settings of `observability.setup`: from its arguments, else OTEL_* variables, else defaults.

A typo in the environment of a job must not end the job. So a variable with an unusable value is
logged and treated as unset, with three exceptions. An endpoint that is no URL is used, and its
exports fail. If all exporters of a signal are unknown, the signal is not exported, unless `setup`
got an endpoint. A port that is no number turns Prometheus off.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from typing import Any, TypeAlias  # Any: arguments of the SDK
from urllib.parse import urlsplit

from observability.setup.counts import Signal
from observability.setup.warning_log import WarningLog

EXPORT_TIMEOUT_S = 3.0
"""Maximum duration of an export with all retries, unless OTEL_EXPORTER_OTLP_TIMEOUT is set."""

_DEFAULT_ENDPOINT = "http://localhost:4318"
_NAMES_IN_VARIABLES: dict[Signal, str] = {"spans": "TRACES", "events": "LOGS", "metrics": "METRICS"}
_PROCESSOR_PREFIXES: dict[Signal, str] = {"spans": "OTEL_BSP", "events": "OTEL_BLRP"}
# Even a small export costs milliseconds of CPU, so exports are infrequent. Only the first report of
# a wait is exported at once.
_INTERVAL_S: dict[Signal, float] = {"spans": 5.0, "events": 5.0, "metrics": 60.0}
# An event has up to 4,096 sample ids. A batch of 128 events is far below the limit of a request,
# 64 MiB.
_BATCH: dict[Signal, int] = {"spans": 512, "events": 128, "metrics": 1}
_QUEUE = 2048
# While the collector is unreachable, half of the queue is retained: 120 exports, or ten minutes.
_STEPS_INTERVAL_S, _STEPS_QUEUE = 5.0, 240

AttributeValue: TypeAlias = str | bool | int | float


@dataclass(frozen=True)
class Arguments:
    """The arguments of `observability.setup`."""

    service_name: str | None
    instance: str | None
    run_id: str | None
    endpoint: str | None
    attributes: tuple[tuple[str, AttributeValue], ...]
    prometheus_port: int | None
    sample_ratio: float | None
    export_interval_s: float | None
    shutdown_timeout_s: float

    def check(self) -> None:
        """Check the ranges of numbers.

        Raises:
            ValueError: a number is out of its range.
        """
        if self.prometheus_port is not None and not 0 <= self.prometheus_port <= 65535:
            raise ValueError(f"prometheus_port={self.prometheus_port}: expected 0 to 65535")
        if self.sample_ratio is not None and not 0 <= self.sample_ratio <= 1:
            raise ValueError(f"sample_ratio={self.sample_ratio}: expected 0 to 1")
        if self.export_interval_s is not None and not 0 < self.export_interval_s < 86400:
            raise ValueError(
                f"export_interval_s={self.export_interval_s}: expected more than 0, below a day"
            )
        if not 0 < self.shutdown_timeout_s < 3600:
            raise ValueError(
                f"shutdown_timeout_s={self.shutdown_timeout_s}: expected more than 0, below an hour"
            )


@dataclass(frozen=True)
class Otlp:
    """The export settings of one signal.

    Attributes:
        endpoint: URL with the path of the signal.
        queue: maximum number of items queued and in flight.
        batch: maximum number of items in one request.
        interval_s: seconds from one export to the next.
        timeout_s: maximum duration of one export with its retries, in seconds.
    """

    endpoint: str
    queue: int
    batch: int
    interval_s: float
    timeout_s: float

    def for_steps(self, interval_s: float | None) -> Otlp:
        """Return the settings for metrics of steps, derived from these settings for metrics.

        Metrics of steps are exported at least as often as other metrics, by default every 5 s.

        Args:
            interval_s: argument ``export_interval_s`` of the setup.
        """
        default_s = min(self.interval_s, _STEPS_INTERVAL_S)
        return replace(self, queue=_STEPS_QUEUE, interval_s=interval_s or default_s)

    @property
    def batching(self) -> dict[str, Any]:
        """Keyword arguments of the SDK's batch processors."""
        return {
            "max_queue_size": self.queue,
            "schedule_delay_millis": self.interval_s * 1000,
            "max_export_batch_size": self.batch,
        }


@dataclass(frozen=True)
class Prometheus:
    """The address of the endpoint that Prometheus scrapes; port 0 is any free port."""

    host: str
    port: int


@dataclass(frozen=True)
class Settings:
    """The exports to set up.

    Attributes:
        otlp: export settings of each exported signal.
        prometheus: address of the Prometheus endpoint; None for no endpoint.
    """

    otlp: dict[Signal, Otlp]
    prometheus: Prometheus | None


def resolve_settings(arguments: Arguments, warning_log: WarningLog) -> Settings:
    """Return the settings: an argument, else the OTEL_* variable, else the default.

    With OTEL_SDK_DISABLED or OTEL_<SIGNAL>_EXPORTER=none, an operator disables export despite the
    arguments.
    """
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return Settings(otlp={}, prometheus=None)
    exported: dict[Signal, Otlp] = {}
    for signal in _NAMES_IN_VARIABLES:
        endpoint = _endpoint(signal, arguments.endpoint, warning_log)
        if endpoint is not None:
            exported[signal] = _otlp(signal, endpoint, arguments.export_interval_s, warning_log)
    return Settings(otlp=exported, prometheus=_prometheus(arguments.prometheus_port, warning_log))


def redacted(endpoint: str) -> str:
    """Return an endpoint without user, password and query, which may be secret."""
    scheme, separator, rest = endpoint.partition("://")
    if not separator:
        scheme, rest = "", endpoint
    return scheme + separator + rest.rpartition("@")[2].partition("?")[0]


def _endpoint(signal: Signal, argument: str | None, warning_log: WarningLog) -> str | None:
    """Return the URL that a signal is sent to; None if the signal is not exported."""
    name = _NAMES_IN_VARIABLES[signal]
    exporters = _listed(f"OTEL_{name}_EXPORTER")
    if "none" in exporters:
        return None
    for unknown in exporters - {"otlp", "prometheus"}:
        warning_log.warn(f"unknown exporter {unknown}", variable=f"OTEL_{name}_EXPORTER")
    base = argument or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    signal_endpoint = None if argument else os.environ.get(f"OTEL_EXPORTER_OTLP_{name}_ENDPOINT")
    if exporters and not argument:
        is_exported = "otlp" in exporters
    else:
        is_exported = bool(base or signal_endpoint)
    if not is_exported:
        return None
    for variable in (f"OTEL_EXPORTER_OTLP_{name}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        protocol = os.environ.get(variable, "").strip()
        if protocol not in ("", "http/protobuf"):
            warning_log.warn(
                f"unsupported protocol {protocol}", variable=variable, supported="http/protobuf"
            )
    base_url = (base or _DEFAULT_ENDPOINT).rstrip("/")
    endpoint = signal_endpoint or f"{base_url}/v1/{name.lower()}"
    if not _is_valid(endpoint):
        warning_log.warn(
            "invalid endpoint",
            endpoint=redacted(endpoint),
            reason="expected http://host:port or https://host:port",
        )
    return endpoint


def _is_valid(endpoint: str) -> bool:
    try:
        parts = urlsplit(endpoint)
        _ = parts.port  # raises if the port is not a number from 0 to 65535
    except ValueError:  # its text may quote a password, so it is not logged
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname)


def _otlp(signal: Signal, endpoint: str, interval_s: float | None, warning_log: WarningLog) -> Otlp:
    queue, batch, interval_variable = 1, 1, "OTEL_METRIC_EXPORT_INTERVAL"
    if prefix := _PROCESSOR_PREFIXES.get(signal):
        queue = int(_positive(f"{prefix}_MAX_QUEUE_SIZE", _QUEUE, warning_log))
        batch = int(_positive(f"{prefix}_MAX_EXPORT_BATCH_SIZE", _BATCH[signal], warning_log))
        interval_variable = f"{prefix}_SCHEDULE_DELAY"
    if interval_s is None:
        interval_s = _positive(interval_variable, _INTERVAL_S[signal] * 1000, warning_log) / 1000
    return Otlp(
        endpoint=endpoint,
        queue=queue,
        batch=min(batch, queue),
        interval_s=interval_s,
        timeout_s=_timeout_s(signal, warning_log),
    )


def _timeout_s(signal: Signal, warning_log: WarningLog) -> float:
    """Return the timeout in seconds from the environment, or the default."""
    for variable in (
        f"OTEL_EXPORTER_OTLP_{_NAMES_IN_VARIABLES[signal]}_TIMEOUT",
        "OTEL_EXPORTER_OTLP_TIMEOUT",
    ):
        text = os.environ.get(variable, "").strip()
        if not text:
            continue
        try:
            timeout_s = float(text)
        except ValueError:
            timeout_s = 0.0
        if 0 < timeout_s < math.inf:
            return timeout_s
        warning_log.warn(f"{variable} is not usable", value=text, expected="seconds above 0")
    return EXPORT_TIMEOUT_S


def _prometheus(port: int | None, warning_log: WarningLog) -> Prometheus | None:
    exporters = _listed("OTEL_METRICS_EXPORTER")
    if "none" in exporters or (port is None and "prometheus" not in exporters):
        return None
    host = os.environ.get("OTEL_EXPORTER_PROMETHEUS_HOST") or "127.0.0.1"
    if port is not None:
        return Prometheus(host, port)
    variable = "OTEL_EXPORTER_PROMETHEUS_PORT"
    text = os.environ.get(variable) or "9464"
    if text.isdecimal() and len(text) <= 5 and int(text) <= 65535:
        return Prometheus(host, int(text))
    warning_log.warn(f"{variable} is not usable", value=text, expected="0 to 65535")
    return None


def _positive(variable: str, default: float, warning_log: WarningLog) -> float:
    """Return a variable's positive integer, or the default."""
    text = os.environ.get(variable, "").strip()
    if not text:
        return default
    if text.isdecimal() and len(text) <= 10 and 0 < int(text) < 2**31:
        return int(text)
    warning_log.warn(f"{variable} is not usable", value=text, used=default)
    return default


def _listed(variable: str) -> set[str]:
    """Return the names in a variable that is a list separated by commas."""
    return {
        name.strip().lower() for name in os.environ.get(variable, "").split(",") if name.strip()
    }
