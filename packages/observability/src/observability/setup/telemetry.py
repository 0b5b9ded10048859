"""`Telemetry`: the providers of one process, from setup to the last export.

A flush or shutdown of the SDK blocks until its request succeeds or times out. So it runs in a
daemon thread, and the caller waits for it until a deadline. The SIGTERM handler uses such a thread
for another reason: it interrupts the main thread, and a lock that the main thread holds would block
the handler forever.
"""

from __future__ import annotations

import atexit
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import FrameType

import structlog
from opentelemetry._logs import LoggerProvider as AnyLoggerProvider
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk.metrics import MeterProvider, _Gauge
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    MetricReader,
    PeriodicExportingMetricReader,
)
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
from opentelemetry.sdk.version import __version__ as sdk_version
from opentelemetry.trace import TracerProvider as AnyTracerProvider

from dataplane_core.arguments import MAX_SECONDS
from observability.bounded_http import BoundedServer
from observability.setup import providers
from observability.setup.baggage import BaggageProcessor
from observability.setup.counts import Counts, ItemCounter, Signal
from observability.setup.export import (
    AdmittingLogProcessor,
    AdmittingSpanProcessor,
    CountedMetricExporter,
    Delivery,
)
from observability.setup.ids import SeedlessIdGenerator
from observability.setup.ready_thread import Done, ReadyThread, wait_all
from observability.setup.settings import Arguments, Prometheus, redacted, resolve_settings
from observability.setup.warning_log import WarningLog, redirect_logs

DROPPED = "dataplane.telemetry.dropped"
"""Name of the metric of dropped items; docs/telemetry.md lists it."""

logger = structlog.get_logger("observability")

_SIGTERM_MARGIN_S = 0.5
"""Seconds that the SIGTERM handler waits for a shutdown, in addition to the shutdown timeout."""


class _Pipeline:
    """The export of one signal, and the thread that runs its flush and shutdown.

    Args:
        delivery: sender of the signal's batches.
        flush: function that exports the queued items.
        shutdown: function that exports the queued items and stops the SDK's part of the export.
        flushes_at_intervals: whether the thread flushes at each export interval. If False, the SDK
            does, and the thread only retries the retained batches.
    """

    def __init__(
        self,
        delivery: Delivery,
        flush: Callable[[], object],
        shutdown: Callable[[], object],
        *,
        flushes_at_intervals: bool = False,
    ) -> None:
        self.delivery = delivery
        self.shutdown = shutdown
        self._flush = flush
        idle = self.flush if flushes_at_intervals else delivery.retry
        self.thread = ReadyThread(idle, delivery.otlp.interval_s)

    def flush(self) -> None:
        """Export the queued and the retained items."""
        self._flush()
        self.delivery.retry()


class Telemetry:
    """The telemetry of a process, returned by `observability.setup`.

    Every method may be called from any thread. No method fails the run or blocks beyond its
    timeout. Queues are bounded: items that do not fit, or that no collector accepts, are dropped
    and counted. The structlog logger ``observability`` logs each kind of trouble once.

    At the end of its ``with`` block, it shuts down.
    """

    def __init__(self, arguments: Arguments) -> None:
        self._pid = os.getpid()
        self._timeout_s = arguments.shutdown_timeout_s
        self._warning_log = WarningLog()
        redirect_logs(self._warning_log)
        self._pipelines: dict[Signal, _Pipeline] = {}
        self._flush_lock = threading.Lock()
        self._flushes: list[Done] = []  # of the last flush, one per pipeline
        self._lock = threading.Lock()
        self._shutdown_began = False
        self._shutdown_finished = threading.Event()
        self._shutdowns: list[Done] = []  # one per pipeline
        self._server: BoundedServer | None = None
        self._previous_handler: Callable[[int, FrameType | None], object] | int | None = None
        self._start(arguments)
        atexit.register(self.shutdown)
        # Without an export there is nothing to send on SIGTERM.
        self._signal_thread = ReadyThread() if self._pipelines else None
        if self._pipelines:
            self._install_sigterm_handler()

    @property
    def prometheus_address(self) -> tuple[str, int] | None:
        """Host and port of the endpoint that Prometheus scrapes; None if there is no endpoint."""
        if self._server is None:
            return None
        return self._server.server_name, self._server.server_port

    @property
    def shutdown_began(self) -> bool:
        """True once `shutdown` was called."""
        return self._shutdown_began

    def counts(self) -> dict[Signal, Counts]:
        """Return the counts of items recorded, exported and dropped so far, per signal.

        A signal without OTLP export counts no items.
        """
        counters = {name: each.delivery.counter for name, each in self._pipelines.items()}
        names: tuple[Signal, ...] = ("spans", "events", "metrics", "steps")
        return {name: counters.get(name, _NO_ITEMS).counts() for name in names}

    def flush(self, timeout_s: float | None = None) -> bool:
        """Export the queued items.

        Args:
            timeout_s: maximum wait in seconds; None is the shutdown timeout.

        Returns:
            True if a collector accepted all queued items. False if the flush timed out, if an
            export failed or will be retried, or if a shutdown dropped items.
        """
        timeout_s = self._wait_s(timeout_s)
        deadline = time.monotonic() + timeout_s
        failed_before = self._export_failures()
        # Start no flush while an earlier one runs, even if it timed out: flushes would pile up.
        if not self._flush_lock.acquire(timeout=timeout_s):
            return False
        try:
            if not wait_all(self._flushes, deadline):
                return False
            if not self._shutdown_began:
                self._flushes = [each.thread.start(each.flush) for each in self._pipelines.values()]
            is_done = wait_all(self._flushes, deadline)
        finally:
            self._flush_lock.release()
        if self._shutdown_began:  # the shutdown sends or drops the queued items
            is_done = self._shutdown_finished.wait(max(deadline - time.monotonic(), 0))
            is_done = is_done and not any(each["shutdown"] for each in self.counts().values())
        has_retained = any(each.delivery.has_retained for each in self._pipelines.values())
        return is_done and not has_retained and self._export_failures() == failed_before

    def shutdown(self, timeout_s: float | None = None) -> None:
        """Export the queued items and stop; items recorded later are dropped and counted.

        If any item was dropped, one line is logged. A second call waits for the first one.

        Args:
            timeout_s: maximum wait in seconds, after which pending items are dropped. None is the
                shutdown timeout of the setup.
        """
        timeout_s = self._wait_s(timeout_s)
        with self._lock:
            is_first_call, self._shutdown_began = not self._shutdown_began, True
        if not is_first_call:
            self._shutdown_finished.wait(timeout_s)
            return
        try:
            self._export_and_stop(time.monotonic() + timeout_s)
        finally:
            for pipeline in self._pipelines.values():
                pipeline.delivery.counter.close()
                pipeline.thread.close()
            self._shutdown_finished.set()
            if self._signal_thread is not None:
                self._signal_thread.close()
            atexit.unregister(self.shutdown)
            self._restore_sigterm_handler()
        self.log_dropped()

    def log_dropped(self) -> None:
        """Log one line, ``telemetry_dropped``, if any item was dropped so far."""
        dropped = {name: each for name, each in self.counts().items() if each["dropped"]}
        if dropped:
            with suppress(Exception):  # an application's log processors may raise anything
                logger.warning("telemetry_dropped", **dropped)

    def __enter__(self) -> Telemetry:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    def reset_after_fork(self) -> None:
        """Mark a forked child's copy of the parent's telemetry as shut down and empty.

        Nothing is sent, and no lock is acquired: a thread of the parent may have held it.
        """
        for pipeline in self._pipelines.values():
            pipeline.delivery.reset_after_fork()
        self._flush_lock, self._lock = threading.Lock(), threading.Lock()
        self._flushes.clear()
        self._shutdown_began = True
        self._shutdown_finished = threading.Event()
        self._shutdown_finished.set()
        if self._server is not None:
            os.close(self._server.socket.detach())

    def _start(self, arguments: Arguments) -> None:
        settings = resolve_settings(arguments, self._warning_log)
        resource = _resource(arguments)
        tracers = loggers = meters = steps = None
        exported: dict[Signal, tuple[Delivery, MetricReader]] = {}
        for name, otlp in settings.otlp.items():
            try:
                delivery = Delivery(name, otlp, self._warning_log)
                if name == "spans":
                    tracers = self._tracer_provider(resource, arguments.sample_ratio, delivery)
                elif name == "events":
                    loggers = self._logger_provider(resource, delivery)
                else:
                    step_settings = otlp.for_steps(arguments.export_interval_s)
                    step_delivery = Delivery("steps", step_settings, self._warning_log)
                    # With delta temporality, the SDK exports a gauge's point once and then discards
                    # it with its attributes. Otherwise it would retain the points of every step.
                    delta: dict[type, AggregationTemporality] = {
                        _Gauge: AggregationTemporality.DELTA
                    }
                    exported = {
                        "metrics": (delivery, _reader(CountedMetricExporter(delivery))),
                        "steps": (
                            step_delivery,
                            _reader(CountedMetricExporter(step_delivery, delta)),
                        ),
                    }
            except Exception as error:  # noqa: BLE001  # a bad environment must not end a run
                self._warning_log.warn(
                    f"exporter not created: {type(error).__name__}",
                    signal=name,
                    endpoint=redacted(otlp.endpoint),
                    reason=str(error),
                )
        readers = [exported["metrics"][1]] if exported else []
        if exported:
            steps = MeterProvider([exported["steps"][1]], resource, shutdown_on_exit=False)
        if settings.prometheus is not None:
            readers += self._prometheus_readers(settings.prometheus)
        if readers:
            meters = MeterProvider(readers, resource, shutdown_on_exit=False)
            meters.get_meter("rl-dataplane").create_observable_counter(
                DROPPED,
                [self._observe_dropped],
                unit="{item}",
                description="Spans, events and exports of step metrics that this process dropped.",
            )
        for name, (delivery, reader) in exported.items():
            self._pipelines[name] = _metric_pipeline(delivery, reader)
        providers.set_providers(
            tracers=tracers,
            loggers=loggers,
            meters=meters,
            steps=steps,
            warning_log=self._warning_log,
        )

    def _tracer_provider(
        self, resource: Resource, sample_ratio: float | None, delivery: Delivery
    ) -> AnyTracerProvider:
        provider = TracerProvider(
            sampler=None if sample_ratio is None else ParentBasedTraceIdRatio(sample_ratio),
            resource=resource,
            shutdown_on_exit=False,
            id_generator=SeedlessIdGenerator(),
        )
        processor = AdmittingSpanProcessor(delivery)
        provider.add_span_processor(BaggageProcessor())
        provider.add_span_processor(processor)
        self._pipelines["spans"] = _Pipeline(delivery, processor.force_flush, processor.shutdown)
        return provider

    def _logger_provider(self, resource: Resource, delivery: Delivery) -> AnyLoggerProvider:
        provider = LoggerProvider(resource=resource, shutdown_on_exit=False)
        processor = AdmittingLogProcessor(delivery)
        provider.add_log_record_processor(processor)
        self._pipelines["events"] = _Pipeline(delivery, processor.force_flush, processor.shutdown)
        return provider

    def _prometheus_readers(self, prometheus: Prometheus) -> list[MetricReader]:
        from opentelemetry.exporter.prometheus import PrometheusMetricReader
        from prometheus_client import CollectorRegistry

        from observability.setup.prometheus import scrape_server

        registry = CollectorRegistry()
        try:
            self._server = scrape_server(prometheus.host, prometheus.port, registry)
        except OSError as error:
            self._warning_log.warn(
                "prometheus endpoint not opened",
                host=prometheus.host,
                port=prometheus.port,
                reason=str(error),
            )
            return []
        return [PrometheusMetricReader(registry=registry)]

    def _observe_dropped(self, options: CallbackOptions) -> Iterable[Observation]:
        """Yield all counts, including zeros: without a first 0, Prometheus sees no increase."""
        # Iterate over a copy: Prometheus may scrape before the pipelines of metrics are added.
        for name, pipeline in list(self._pipelines.items()):
            if name == "metrics":
                continue  # a failed export loses nothing, since the next one has newer totals
            counts = pipeline.delivery.counter.counts()
            for reason in ("queue_full", "export_failed", "shutdown"):
                labels = {"dataplane.signal": name, "dataplane.reason": reason}
                yield Observation(counts[reason], labels)

    def _wait_s(self, timeout_s: float | None) -> float:
        """Return a timeout that locks accept: infinity is longer than they can wait."""
        return min(max(0, self._timeout_s if timeout_s is None else timeout_s), MAX_SECONDS)

    def _export_failures(self) -> int:
        return sum(each["export_failed"] for each in self.counts().values())

    def _export_and_stop(self, deadline: float) -> None:
        for pipeline in self._pipelines.values():
            pipeline.delivery.begin_shutdown(deadline)
        self._shutdowns = [each.thread.start(each.shutdown) for each in self._pipelines.values()]
        if self._server is not None:
            self._server.shutdown()  # returns within a poll interval of 0.1 s
            self._server.server_close()
        if not wait_all(self._shutdowns, deadline):
            self._warning_log.warn("shutdown timed out")

    def _install_sigterm_handler(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        previous = signal.getsignal(signal.SIGTERM)
        if previous in (signal.SIG_IGN, None):  # None: C code set the handler; it cannot be called
            return
        self._previous_handler = previous
        signal.signal(signal.SIGTERM, self._on_sigterm)

    def _restore_sigterm_handler(self) -> None:
        is_installed = signal.getsignal(signal.SIGTERM) == self._on_sigterm
        if is_installed and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._previous_handler)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        """Export the queued items, then call the previous handler or the default action."""
        previous = self._previous_handler
        if os.getpid() == self._pid and self._signal_thread is not None:
            deadline = time.monotonic() + self._timeout_s + _SIGTERM_MARGIN_S
            if self._shutdown_began:
                # The main thread may be in `shutdown`, which continues only after this handler. So
                # `_shutdown_finished` may not be set before the handler returns.
                wait_all(self._shutdowns, deadline)
            else:
                # A previous handler may keep the process alive, so only flush before it.
                action = self.flush if callable(previous) else self.shutdown
                wait_all([self._signal_thread.start(action)], deadline)
        if callable(previous):
            previous(number, frame)
            return
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)


_NO_ITEMS = ItemCounter(0)


def _reader(exporter: CountedMetricExporter) -> MetricReader:
    """Return a reader that collects only when its pipeline flushes it.

    A reader with an interval may collect before its provider registers it. Then the SDK warns.
    """
    return PeriodicExportingMetricReader(exporter, export_interval_millis=math.inf)


def _metric_pipeline(delivery: Delivery, reader: MetricReader) -> _Pipeline:
    """Return the pipeline of a registered reader.

    It flushes this reader, not the provider. A flush of the provider would also collect for the
    Prometheus reader, which stores every collection until the next scrape.
    """

    def shutdown() -> None:
        pipeline.flush()  # a reader with an infinite interval does not collect at its shutdown
        reader.shutdown()

    pipeline = _Pipeline(delivery, reader.force_flush, shutdown, flushes_at_intervals=True)
    return pipeline


def _resource(arguments: Arguments) -> Resource:
    defaults: dict[str, str | bool | int | float] = {
        "telemetry.sdk.language": "python",
        "telemetry.sdk.name": "opentelemetry",
        "telemetry.sdk.version": sdk_version,
        "service.name": "unknown_service",
        "host.name": socket.gethostname(),
        "process.pid": os.getpid(),
    }
    explicit = dict(arguments.attributes)
    for name, value in (
        ("service.name", arguments.service_name),
        ("service.instance.id", arguments.instance),
        ("rl.run_id", arguments.run_id),
    ):
        if value is not None:
            explicit[name] = value
    # `Resource.create` would add a random service.instance.id. Here this attribute is the rank.
    return Resource(defaults).merge(OTELResourceDetector().detect()).merge(Resource(explicit))
