"""The providers that are registered with OpenTelemetry, and what they stand for at the moment.

OpenTelemetry takes a global provider once per process. Ours are registered once and hand on to the
SDK's, so that telemetry can end, start again (tests do) and fall silent in a forked child.
Tracers and loggers follow such a change; an instrument belongs to the provider it was made by.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, cast  # Any: arguments of the OpenTelemetry API pass through unread

from opentelemetry import _logs, metrics, trace
from opentelemetry.util.types import Attributes

from observability._setup_troubles import Troubles
from observability.lane import Lane, Work


class _Tracers(trace.TracerProvider):
    def __init__(self) -> None:
        self.provider: trace.TracerProvider = trace.NoOpTracerProvider()
        self.lane: Lane | None = None

    def later(self, work: Work) -> None:
        """See `observability.lane.later`."""
        _put(self.lane, work)

    def get_tracer(
        self,
        instrumenting_module_name: str,
        instrumenting_library_version: str | None = None,
        schema_url: str | None = None,
        attributes: Attributes = None,
    ) -> trace.Tracer:
        return _Tracer(
            self,
            (instrumenting_module_name, instrumenting_library_version, schema_url, attributes),
        )


class _Tracer(trace.Tracer):
    def __init__(
        self, tracers: _Tracers, scope: tuple[str, str | None, str | None, Attributes]
    ) -> None:
        self._tracers = tracers
        self._scope = scope
        self._real = tracers.provider, tracers.provider.get_tracer(*scope)

    def start_span(self, name: str, *args: Any, **kwargs: Any) -> trace.Span:
        return self._tracer().start_span(name, *args, **kwargs)

    def start_as_current_span(  # type: ignore[override]  # the API decorates its own
        self, name: str, *args: Any, **kwargs: Any
    ) -> AbstractContextManager[trace.Span]:
        return cast(
            "AbstractContextManager[trace.Span]",
            self._tracer().start_as_current_span(name, *args, **kwargs),
        )

    def _tracer(self) -> trace.Tracer:
        provider, tracer = self._real
        if provider is not self._tracers.provider:
            provider = self._tracers.provider
            tracer = provider.get_tracer(*self._scope)
            self._real = provider, tracer
        return tracer


class _Loggers(_logs.LoggerProvider):
    def __init__(self) -> None:
        self.provider: _logs.LoggerProvider = _logs.NoOpLoggerProvider()
        self.lane: Lane | None = None

    def later(self, work: Work) -> None:
        """See `observability.lane.later`."""
        _put(self.lane, work)

    def get_logger(
        self,
        name: str,
        version: str | None = None,
        schema_url: str | None = None,
        attributes: Attributes = None,
    ) -> _logs.Logger:
        return _Logger(self, (name, version, schema_url, attributes))

    def force_flush(self, timeout_millis: int) -> bool:
        """Export the events that are queued, if an SDK stands behind this."""
        if self.lane is not None:
            self.lane.drain()
        flush = getattr(self.provider, "force_flush", None)
        return flush is None or bool(flush(timeout_millis))


class _Logger(_logs.Logger):
    def __init__(
        self, loggers: _Loggers, scope: tuple[str, str | None, str | None, Attributes]
    ) -> None:
        super().__init__(*scope)
        self._loggers = loggers
        self._scope = scope
        self._real = loggers.provider, loggers.provider.get_logger(*scope)

    def emit(self, *args: Any, **kwargs: Any) -> None:
        self._logger().emit(*args, **kwargs)

    def enabled(self, **kwargs: Any) -> bool:
        return self._logger().enabled(**kwargs)

    def _logger(self) -> _logs.Logger:
        provider, logger = self._real
        if provider is not self._loggers.provider:
            provider = self._loggers.provider
            logger = provider.get_logger(*self._scope)
            self._real = provider, logger
        return logger


class _Meters(metrics.MeterProvider):
    def __init__(self) -> None:
        self.provider: metrics.MeterProvider = metrics.NoOpMeterProvider()
        self.lane: Lane | None = None

    def later(self, work: Work) -> None:
        """See `observability.lane.later`."""
        _put(self.lane, work)

    def get_meter(
        self,
        name: str,
        version: str | None = None,
        schema_url: str | None = None,
        attributes: Attributes = None,
    ) -> metrics.Meter:
        return self.provider.get_meter(name, version, schema_url, attributes)


def _put(lane: Lane | None, work: Work) -> None:
    if lane is None:
        work()
    else:
        lane.put(work)


_tracers, _loggers, _meters = _Tracers(), _Loggers(), _Meters()


def use(
    *,
    tracers: trace.TracerProvider | None = None,
    loggers: _logs.LoggerProvider | None = None,
    meters: metrics.MeterProvider | None = None,
    lane: Lane | None = None,
    troubles: Troubles,
) -> None:
    """Let the global providers stand for these; for None of a signal they do nothing.

    What operations tell is made of them in ``lane``.

    A global provider is registered when it first stands for something.
    """
    _tracers.provider = tracers or trace.NoOpTracerProvider()
    _loggers.provider = loggers or _logs.NoOpLoggerProvider()
    _meters.provider = meters or metrics.NoOpMeterProvider()
    _tracers.lane = _loggers.lane = _meters.lane = lane
    if tracers is not None and trace.get_tracer_provider() is not _tracers:
        trace.set_tracer_provider(_tracers)
        _expect(trace.get_tracer_provider() is _tracers, "TracerProvider", troubles)
    if loggers is not None and _logs.get_logger_provider() is not _loggers:
        _logs.set_logger_provider(_loggers)
        _expect(_logs.get_logger_provider() is _loggers, "LoggerProvider", troubles)
    if meters is not None and metrics.get_meter_provider() is not _meters:
        metrics.set_meter_provider(_meters)
        _expect(metrics.get_meter_provider() is _meters, "MeterProvider", troubles)


def silence() -> None:
    """Let the global providers do nothing."""
    _tracers.provider = trace.NoOpTracerProvider()
    _loggers.provider = _logs.NoOpLoggerProvider()
    _meters.provider = metrics.NoOpMeterProvider()
    _tracers.lane = _loggers.lane = _meters.lane = None


def _expect(registered: bool, kind: str, troubles: Troubles) -> None:
    if not registered:
        troubles.tell(
            f"another {kind} is registered already",
            consequence="what goes through the global one is not exported by observability.setup",
        )
