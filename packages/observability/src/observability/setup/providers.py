"""The proxies registered as OpenTelemetry's global providers, and the SDK providers behind them.

OpenTelemetry accepts a global provider once per process. So proxies are registered once and forward
to the SDK's providers. Thus telemetry can shut down, start again, and stop in a forked child.
Tracers and loggers follow such a change; an instrument belongs to the provider that made it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar, cast  # Any: arguments of OpenTelemetry's API

from opentelemetry import _logs, metrics, trace

from observability.setup.troubles import Troubles

T = TypeVar("T")


class _Following(Generic[T]):
    """The tracer or logger of the provider that is currently behind a proxy.

    Args:
        provider: function that returns that provider.
        get: function that returns the tracer or logger of a provider.
    """

    def __init__(self, provider: Callable[[], Any], get: Callable[[Any], T]) -> None:
        self._provider, self._get = provider, get
        behind = provider()
        self._cached = behind, get(behind)

    def __call__(self) -> T:
        provider, instance = self._cached
        if provider is not self._provider():
            provider = self._provider()
            instance = self._get(provider)
            self._cached = provider, instance
        return instance


class _Tracer(trace.Tracer):
    def __init__(self, real: _Following[trace.Tracer]) -> None:
        self._real = real

    def start_span(self, *args: Any, **kwargs: Any) -> trace.Span:
        return self._real().start_span(*args, **kwargs)

    def start_as_current_span(  # type: ignore[override]  # the API decorates its own
        self, *args: Any, **kwargs: Any
    ) -> AbstractContextManager[trace.Span]:
        return cast(
            "AbstractContextManager[trace.Span]",
            self._real().start_as_current_span(*args, **kwargs),
        )


class _Tracers(trace.TracerProvider):
    def __init__(self) -> None:
        self.behind: trace.TracerProvider = trace.NoOpTracerProvider()

    def get_tracer(self, *scope: Any, **more: Any) -> trace.Tracer:
        return _Tracer(
            _Following(lambda: self.behind, lambda behind: behind.get_tracer(*scope, **more))
        )


class _Logger(_logs.Logger):
    def __init__(self, real: _Following[_logs.Logger], name: str) -> None:
        super().__init__(name)
        self._real = real

    def emit(self, *args: Any, **kwargs: Any) -> None:
        self._real().emit(*args, **kwargs)

    def enabled(self, **kwargs: Any) -> bool:
        return self._real().enabled(**kwargs)


class _Loggers(_logs.LoggerProvider):
    def __init__(self) -> None:
        self.behind: _logs.LoggerProvider = _logs.NoOpLoggerProvider()

    def get_logger(self, name: str, *scope: Any, **more: Any) -> _logs.Logger:
        real = _Following[_logs.Logger](
            lambda: self.behind, lambda behind: behind.get_logger(name, *scope, **more)
        )
        return _Logger(real, name)

    def force_flush(self, timeout_millis: int) -> bool:
        """Export the queued events, if an SDK is behind this proxy."""
        flush = getattr(self.behind, "force_flush", None)
        return flush is None or bool(flush(timeout_millis))


class _Meters(metrics.MeterProvider):
    def __init__(self) -> None:
        self.behind: metrics.MeterProvider = metrics.NoOpMeterProvider()
        self.steps: metrics.MeterProvider = metrics.NoOpMeterProvider()

    def get_meter(self, *scope: Any, **more: Any) -> metrics.Meter:
        return self.behind.get_meter(*scope, **more)


_tracers, _loggers, _meters = _Tracers(), _Loggers(), _Meters()


def use(
    *,
    tracers: trace.TracerProvider | None = None,
    loggers: _logs.LoggerProvider | None = None,
    meters: metrics.MeterProvider | None = None,
    steps: metrics.MeterProvider | None = None,
    troubles: Troubles,
) -> None:
    """Set the providers behind the proxies; None makes the proxy of a signal do nothing.

    ``steps`` is the provider of metrics of steps, see `step_meters`.

    A proxy is registered when it first gets a provider. If the program registered another provider
    before, that one stays, and a warning is logged.
    """
    silence()
    if tracers is not None:
        _tracers.behind = tracers
        if trace.get_tracer_provider() is not _tracers:
            trace.set_tracer_provider(_tracers)
            _check(trace.get_tracer_provider() is _tracers, "TracerProvider", troubles)
    if loggers is not None:
        _loggers.behind = loggers
        if _logs.get_logger_provider() is not _loggers:
            _logs.set_logger_provider(_loggers)
            _check(_logs.get_logger_provider() is _loggers, "LoggerProvider", troubles)
    if meters is not None:
        _meters.behind = meters
        if metrics.get_meter_provider() is not _meters:
            metrics.set_meter_provider(_meters)
            _check(metrics.get_meter_provider() is _meters, "MeterProvider", troubles)
    if steps is not None:
        _meters.steps = steps


def step_meters() -> metrics.MeterProvider:
    """Return the provider of metrics of steps: the program's own meter provider if it has one."""
    registered = metrics.get_meter_provider()
    return _meters.steps if registered is _meters else registered


def silence() -> None:
    """Make the proxies do nothing."""
    _tracers.behind = trace.NoOpTracerProvider()
    _loggers.behind = _logs.NoOpLoggerProvider()
    _meters.behind = metrics.NoOpMeterProvider()
    _meters.steps = metrics.NoOpMeterProvider()


def _check(registered: bool, kind: str, troubles: Troubles) -> None:
    if not registered:
        troubles.warn(
            f"another {kind} is registered already",
            consequence="telemetry that goes through it is not exported by observability.setup",
        )
