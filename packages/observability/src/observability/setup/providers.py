"""The proxies registered as OpenTelemetry's global providers, and the SDK providers behind them.

OpenTelemetry accepts a global provider once per process. So a proxy is registered once. It forwards
to an SDK provider, which is replaced when telemetry is set up again, and removed in a forked child.
Tracers and loggers of a proxy follow the change. Meters and instruments do not: they belong to the
provider that created them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar, cast  # Any: arguments of OpenTelemetry's API

from opentelemetry import _logs, metrics, trace

from observability.setup.warning_log import WarningLog

T = TypeVar("T")


class _CurrentInstance(Generic[T]):
    """A callable that returns the tracer or logger of a proxy's current provider.

    Args:
        provider: function that returns the current provider.
        create: function that returns the tracer or logger of a provider.
    """

    def __init__(self, provider: Callable[[], Any], create: Callable[[Any], T]) -> None:
        self._provider, self._create = provider, create
        current = provider()
        self._cached = current, create(current)

    def __call__(self) -> T:
        provider, instance = self._cached
        if provider is not self._provider():
            provider = self._provider()
            instance = self._create(provider)
            self._cached = provider, instance
        return instance


class _ProxyTracer(trace.Tracer):
    def __init__(self, current: _CurrentInstance[trace.Tracer]) -> None:
        self._current = current

    def start_span(self, *args: Any, **kwargs: Any) -> trace.Span:
        return self._current().start_span(*args, **kwargs)

    def start_as_current_span(  # type: ignore[override]  # a decorator of the API changes its type
        self, *args: Any, **kwargs: Any
    ) -> AbstractContextManager[trace.Span]:
        return cast(
            "AbstractContextManager[trace.Span]",
            self._current().start_as_current_span(*args, **kwargs),
        )


class _ProxyTracerProvider(trace.TracerProvider):
    def __init__(self) -> None:
        self.provider: trace.TracerProvider = trace.NoOpTracerProvider()

    def get_tracer(self, *args: Any, **kwargs: Any) -> trace.Tracer:
        return _ProxyTracer(
            _CurrentInstance(
                lambda: self.provider, lambda provider: provider.get_tracer(*args, **kwargs)
            )
        )


class _ProxyLogger(_logs.Logger):
    def __init__(self, current: _CurrentInstance[_logs.Logger], name: str) -> None:
        super().__init__(name)
        self._current = current

    def emit(self, *args: Any, **kwargs: Any) -> None:
        self._current().emit(*args, **kwargs)

    def enabled(self, **kwargs: Any) -> bool:
        return self._current().enabled(**kwargs)


class _ProxyLoggerProvider(_logs.LoggerProvider):
    def __init__(self) -> None:
        self.provider: _logs.LoggerProvider = _logs.NoOpLoggerProvider()

    def get_logger(self, name: str, *args: Any, **kwargs: Any) -> _logs.Logger:
        current = _CurrentInstance[_logs.Logger](
            lambda: self.provider, lambda provider: provider.get_logger(name, *args, **kwargs)
        )
        return _ProxyLogger(current, name)

    def force_flush(self, timeout_millis: int) -> bool:
        """Export the queued events; without an SDK there are none."""
        flush = getattr(self.provider, "force_flush", None)
        return flush is None or bool(flush(timeout_millis))


class _ProxyMeterProvider(metrics.MeterProvider):
    def __init__(self) -> None:
        self.provider: metrics.MeterProvider = metrics.NoOpMeterProvider()
        self.step_provider: metrics.MeterProvider = metrics.NoOpMeterProvider()

    def get_meter(self, *args: Any, **kwargs: Any) -> metrics.Meter:
        return self.provider.get_meter(*args, **kwargs)


_tracers, _loggers, _meters = (
    _ProxyTracerProvider(),
    _ProxyLoggerProvider(),
    _ProxyMeterProvider(),
)


def set_providers(
    *,
    tracers: trace.TracerProvider | None = None,
    loggers: _logs.LoggerProvider | None = None,
    meters: metrics.MeterProvider | None = None,
    steps: metrics.MeterProvider | None = None,
    warning_log: WarningLog,
) -> None:
    """Set the providers of the proxies; a proxy without a provider does nothing.

    A proxy is registered when it first gets a provider. If the program registered its own global
    provider before, that provider remains, and a warning is logged.

    Args:
        tracers: provider of tracers.
        loggers: provider of loggers.
        meters: provider of meters, except for metrics of steps.
        steps: provider of meters for metrics of steps, see `step_meters`.
        warning_log: logger of the warnings.
    """
    remove_providers()
    if tracers is not None:
        _tracers.provider = tracers
        if trace.get_tracer_provider() is not _tracers:
            trace.set_tracer_provider(_tracers)
            _warn_unless(trace.get_tracer_provider() is _tracers, "TracerProvider", warning_log)
    if loggers is not None:
        _loggers.provider = loggers
        if _logs.get_logger_provider() is not _loggers:
            _logs.set_logger_provider(_loggers)
            _warn_unless(_logs.get_logger_provider() is _loggers, "LoggerProvider", warning_log)
    if meters is not None:
        _meters.provider = meters
        if metrics.get_meter_provider() is not _meters:
            metrics.set_meter_provider(_meters)
            _warn_unless(metrics.get_meter_provider() is _meters, "MeterProvider", warning_log)
    if steps is not None:
        _meters.step_provider = steps


def step_meters() -> metrics.MeterProvider:
    """Return the provider of meters for metrics of steps.

    If the program registered its own global meter provider, that one is returned.
    """
    registered = metrics.get_meter_provider()
    return _meters.step_provider if registered is _meters else registered


def remove_providers() -> None:
    """Make the proxies do nothing."""
    _tracers.provider = trace.NoOpTracerProvider()
    _loggers.provider = _logs.NoOpLoggerProvider()
    _meters.provider = metrics.NoOpMeterProvider()
    _meters.step_provider = metrics.NoOpMeterProvider()


def _warn_unless(is_registered: bool, kind: str, warning_log: WarningLog) -> None:
    if not is_registered:
        warning_log.warn(
            f"another {kind} is registered already",
            consequence="telemetry that goes through it is not exported by observability.setup",
        )
