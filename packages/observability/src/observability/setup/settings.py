"""Settings of `observability.setup`: its arguments, then the OTEL_* variables, then defaults.

A variable with an unusable value is logged and counts as unset: a typo in the environment of a job
must not end it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any, TypeAlias  # Any: arguments of the SDK
from urllib.parse import urlsplit

from observability.setup.ledger import Signal
from observability.setup.troubles import Troubles

EXPORT_TIMEOUT_S = 3.0
"""Maximum duration of an export with all retries, unless OTEL_EXPORTER_OTLP_TIMEOUT is set."""

_DEFAULT_ENDPOINT = "http://localhost:4318"
_VARIABLE: dict[Signal, str] = {"spans": "TRACES", "events": "LOGS", "metrics": "METRICS"}
_PROCESSOR: dict[Signal, str] = {"spans": "OTEL_BSP", "events": "OTEL_BLRP"}
# An export costs milliseconds of CPU, whatever its size, so exports are infrequent. Only the first
# report of a wait is flushed at once.
_INTERVAL_S: dict[Signal, float] = {"spans": 5.0, "events": 5.0, "metrics": 60.0}
# An event names up to 4,096 samples, so a batch stays far below the 64 MiB limit of a request.
_BATCH: dict[Signal, int] = {"spans": 512, "events": 128, "metrics": 1}
_QUEUE = 2048
# While the collector is unreachable, half of the queue is retained: ten minutes of exports.
_STEPS_INTERVAL_S, _STEPS_QUEUE = 5.0, 240

AttributeValue: TypeAlias = str | bool | int | float


@dataclass(frozen=True)
class Arguments:
    """The arguments of `observability.setup`, as given."""

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
        timeout_s: maximum duration of one export in seconds; None if a variable sets it.
    """

    endpoint: str
    queue: int
    batch: int
    interval_s: float
    timeout_s: float | None

    def of_steps(self, interval_s: float | None) -> Otlp:
        """Return the settings for metrics of steps, from those of metrics.

        They are exported at least as often as other metrics, and every 5 s by default.
        """
        default = min(self.interval_s, _STEPS_INTERVAL_S)
        return replace(self, queue=_STEPS_QUEUE, interval_s=interval_s or default)

    @property
    def batching(self) -> dict[str, Any]:
        """Arguments of the SDK's batch processors."""
        return {
            "max_queue_size": self.queue,
            "schedule_delay_millis": self.interval_s * 1000,
            "max_export_batch_size": self.batch,
        }


@dataclass(frozen=True)
class Prometheus:
    """The address where metrics can be scraped; port 0 is any free one."""

    host: str
    port: int


@dataclass(frozen=True)
class Settings:
    """The exports and endpoints to set up.

    Attributes:
        otlp: settings of each exported signal.
        prometheus: endpoint for Prometheus, or None.
    """

    otlp: dict[Signal, Otlp]
    prometheus: Prometheus | None


def settings(arguments: Arguments, troubles: Troubles) -> Settings:
    """Return the settings: arguments win over OTEL_* variables, these over defaults.

    OTEL_SDK_DISABLED and OTEL_<SIGNAL>_EXPORTER=none let an operator overrule the arguments.
    """
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return Settings(otlp={}, prometheus=None)
    exported: dict[Signal, Otlp] = {}
    for signal in _VARIABLE:
        endpoint = _endpoint(signal, arguments.endpoint, troubles)
        if endpoint is not None:
            exported[signal] = _otlp(signal, endpoint, arguments.export_interval_s, troubles)
    return Settings(otlp=exported, prometheus=_prometheus(arguments.prometheus_port, troubles))


def redacted(endpoint: str) -> str:
    """Return an endpoint without its user, password and query, which may be secret."""
    scheme, separator, rest = endpoint.partition("://")
    if not separator:
        scheme, rest = "", endpoint
    return scheme + separator + rest.rpartition("@")[2].partition("?")[0]


def _endpoint(signal: Signal, argument: str | None, troubles: Troubles) -> str | None:
    """Return the URL that a signal is sent to, or None if it is not exported."""
    name = _VARIABLE[signal]
    chosen = _names(f"OTEL_{name}_EXPORTER")
    if "none" in chosen:
        return None
    for unknown in chosen - {"otlp", "prometheus"}:
        troubles.warn(f"unknown exporter {unknown}", variable=f"OTEL_{name}_EXPORTER")
    base = argument or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    own = None if argument else os.environ.get(f"OTEL_EXPORTER_OTLP_{name}_ENDPOINT")
    is_exported = bool(base or own) if not chosen or argument else "otlp" in chosen
    if not is_exported:
        return None
    for variable in (f"OTEL_EXPORTER_OTLP_{name}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        protocol = os.environ.get(variable, "").strip()
        if protocol not in ("", "http/protobuf"):
            troubles.warn(
                f"unsupported protocol {protocol}", variable=variable, supported="http/protobuf"
            )
    endpoint = own or f"{(base or _DEFAULT_ENDPOINT).rstrip('/')}/v1/{name.lower()}"
    if wrong := _wrong(endpoint):
        troubles.warn("invalid endpoint", endpoint=redacted(endpoint), reason=wrong)
    return endpoint


def _wrong(endpoint: str) -> str | None:
    """Return why an endpoint is invalid, or None."""
    try:
        parts = urlsplit(endpoint)
        usable = parts.port is None or parts.port >= 0  # raises if it is not a number
    except ValueError:  # not reported, since its text may quote a password
        usable = False
    if usable and parts.scheme in ("http", "https") and parts.hostname:
        return None
    return "expected http://host:port or https://host:port"


def _otlp(signal: Signal, endpoint: str, interval_s: float | None, troubles: Troubles) -> Otlp:
    queue, batch, delay = 1, 1, "OTEL_METRIC_EXPORT_INTERVAL"
    if prefix := _PROCESSOR.get(signal):
        queue = int(_positive(f"{prefix}_MAX_QUEUE_SIZE", _QUEUE, troubles))
        batch = int(_positive(f"{prefix}_MAX_EXPORT_BATCH_SIZE", _BATCH[signal], troubles))
        delay = f"{prefix}_SCHEDULE_DELAY"
    name = _VARIABLE[signal]
    timeouts = (f"OTEL_EXPORTER_OTLP_{name}_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT")
    return Otlp(
        endpoint=endpoint,
        queue=queue,
        batch=min(batch, queue),
        interval_s=interval_s or _positive(delay, _INTERVAL_S[signal] * 1000, troubles) / 1000,
        timeout_s=None if any(os.environ.get(each) for each in timeouts) else EXPORT_TIMEOUT_S,
    )


def _prometheus(port: int | None, troubles: Troubles) -> Prometheus | None:
    chosen = _names("OTEL_METRICS_EXPORTER")
    if "none" in chosen or (port is None and "prometheus" not in chosen):
        return None
    host = os.environ.get("OTEL_EXPORTER_PROMETHEUS_HOST") or "127.0.0.1"
    if port is not None:
        return Prometheus(host, port)
    variable = "OTEL_EXPORTER_PROMETHEUS_PORT"
    text = os.environ.get(variable) or "9464"
    if text.isdecimal() and int(text) <= 65535:
        return Prometheus(host, int(text))
    troubles.warn(f"{variable} is not usable", value=text, expected="0 to 65535")
    return None


def _positive(variable: str, default: float, troubles: Troubles) -> float:
    text = os.environ.get(variable, "").strip()
    if not text:
        return default
    if text.isdecimal() and 0 < int(text) < 2**31:
        return int(text)
    troubles.warn(f"{variable} is not usable", value=text, used=default)
    return default


def _names(variable: str) -> set[str]:
    return {
        name.strip().lower() for name in os.environ.get(variable, "").split(",") if name.strip()
    }
