"""`Telemetry`: the providers of one process, from set-up to the last export.

The SDK's flush and shutdown block as long as the network does. So they run in daemon threads, which
callers wait for with a deadline. That also keeps the SIGTERM handler safe: it interrupts the main
thread and must not acquire a lock that this thread may hold.
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
from types import FrameType, TracebackType

import structlog
from opentelemetry._logs import LoggerProvider as AnyLoggerProvider
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.metrics import MeterProvider as AnyMeterProvider
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

from observability.bounded_http import BoundedServer
from observability.setup import providers
from observability.setup.baggage import BaggageProcessor
from observability.setup.export import (
    AdmittingLogProcessor,
    AdmittingSpanProcessor,
    CountedMetricExporter,
    Delivery,
)
from observability.setup.ids import SeedlessIdGenerator
from observability.setup.ledger import Counts, Ledger, Signal
from observability.setup.ready_thread import Done, ReadyThread, wait_all
from observability.setup.settings import Arguments, Prometheus, redacted, settings
from observability.setup.troubles import Troubles, take_over_logs

DROPPED = "dataplane.telemetry.dropped"
"""Name of the metric of lost items; docs/telemetry.md lists it."""

logger = structlog.get_logger("observability")


class _Pipeline:
    """The export of one signal, and the thread that runs its flush and shutdown.

    ``polls`` makes the thread flush at each interval, for a metric reader without a thread.
    """

    def __init__(
        self,
        delivery: Delivery,
        flush: Callable[[], object],
        shutdown: Callable[[], object],
        *,
        polls: bool = False,
    ) -> None:
        self.delivery = delivery
        self.shutdown = shutdown
        self._flush = flush
        self.thread = ReadyThread(self.flush if polls else delivery.retry, delivery.otlp.interval_s)

    def flush(self) -> None:
        """Export the queued and the retained items."""
        self._flush()
        self.delivery.retry()


class Telemetry:
    """The telemetry of a process, returned by `observability.setup`.

    Every method may be called from any thread. No method fails the run or blocks beyond its
    timeout: queues are bounded; items that do not fit, or that no collector accepts, are dropped
    and counted. The structlog logger ``observability`` logs each kind of trouble once.

    As a context manager it shuts down at the end.
    """

    def __init__(self, arguments: Arguments) -> None:
        self._pid = os.getpid()
        self._timeout_s = arguments.shutdown_timeout_s
        self._troubles = Troubles()
        take_over_logs(self._troubles)
        self._pipelines: dict[Signal, _Pipeline] = {}
        self._flushing = threading.Lock()
        self._flushes: list[Done] = []  # flags of the last flush
        self._lock = threading.Lock()
        self._ending = False
        self._ended = threading.Event()
        self._shutdowns: list[Done] = []
        self._server: BoundedServer | None = None
        self._previous: Callable[[int, FrameType | None], object] | int | None = None
        self._start(arguments)
        atexit.register(self.shutdown)
        # Without an export there is nothing to send on SIGTERM.
        self._on_signal = ReadyThread() if self._pipelines else None
        if self._pipelines:
            self._take_sigterm()

    @property
    def prometheus_address(self) -> tuple[str, int] | None:
        """Host and port of the Prometheus endpoint; None if there is none."""
        if self._server is None:
            return None
        return self._server.server_name, self._server.server_port

    @property
    def ended(self) -> bool:
        """True once `shutdown` was called."""
        return self._ending

    def counts(self) -> dict[Signal, Counts]:
        """Return the counts of items recorded, exported and dropped so far, per signal.

        A signal without OTLP export records no items: its counts are 0.
        """
        ledgers = {name: each.delivery.ledger for name, each in self._pipelines.items()}
        names: tuple[Signal, ...] = ("spans", "events", "metrics", "steps")
        return {name: ledgers.get(name, _NOTHING).counts() for name in names}

    def flush(self, timeout_s: float | None = None) -> bool:
        """Export the queued items.

        Args:
            timeout_s: maximum wait in seconds; None is the shutdown timeout.

        Returns:
            True if a collector accepted all queued items; False if the time ran out, an export
            failed or will be retried, or shutdown dropped items.
        """
        timeout_s = max(self._timeout_s if timeout_s is None else timeout_s, 0)
        deadline = time.monotonic() + timeout_s
        failed = self._failed()
        # Start no flush while an earlier one runs, even one that timed out: they would pile up.
        if not self._flushing.acquire(timeout=timeout_s):
            return False
        try:
            if not wait_all(self._flushes, deadline):
                return False
            if not self._ending:
                self._flushes = [each.thread.start(each.flush) for each in self._all()]
            done = wait_all(self._flushes, deadline)
        finally:
            self._flushing.release()
        if self._ending:  # then shutdown sends or drops the queued items
            done = self._ended.wait(max(deadline - time.monotonic(), 0))
            done = done and not any(each["shutdown"] for each in self.counts().values())
        retained = any(each.delivery.has_retained for each in self._all())
        return done and not retained and self._failed() == failed

    def shutdown(self, timeout_s: float | None = None) -> None:
        """Export the queued items and stop; items recorded later are dropped and counted.

        A second call waits for the first one. Log one line if any item was dropped.

        Args:
            timeout_s: maximum wait in seconds, after which pending items are dropped; None is the
                shutdown timeout of the set-up.
        """
        timeout_s = max(self._timeout_s if timeout_s is None else timeout_s, 0)
        with self._lock:
            first, self._ending = not self._ending, True
        if not first:
            self._ended.wait(timeout_s)
            return
        try:
            self._finish(time.monotonic() + timeout_s)
        finally:
            for pipeline in self._all():
                pipeline.delivery.ledger.close()
                pipeline.thread.close()
            self._ended.set()
            if self._on_signal is not None:
                self._on_signal.close()
            atexit.unregister(self.shutdown)
            self._restore_sigterm()
        self.report()

    def report(self) -> None:
        """Log one line, ``telemetry_dropped``, if any item was dropped so far."""
        dropped = {name: each for name, each in self.counts().items() if each["dropped"]}
        if dropped:
            with suppress(Exception):  # an application's log processors may raise anything
                logger.warning("telemetry_dropped", **dropped)

    def __enter__(self) -> Telemetry:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()

    def disown(self) -> None:
        """Detach a forked child from the parent's state, without taking a lock or sending."""
        for pipeline in self._all():
            pipeline.delivery.disown()
        self._flushing, self._lock = threading.Lock(), threading.Lock()
        self._flushes.clear()
        self._ending = True
        self._ended = threading.Event()
        self._ended.set()
        if self._server is not None:
            os.close(self._server.socket.detach())

    def _start(self, arguments: Arguments) -> None:
        chosen = settings(arguments, self._troubles)
        resource = _resource(arguments)
        tracers = loggers = meters = steps = None
        readers: list[MetricReader] = []
        for name, otlp in chosen.otlp.items():
            try:
                delivery = Delivery(name, otlp, self._troubles)
                if name == "spans":
                    tracers = self._traced(resource, arguments.sample_ratio, delivery)
                elif name == "events":
                    loggers = self._logged(resource, delivery)
                else:
                    readers.append(self._periodic(delivery))
                    of_steps = otlp.of_steps(arguments.export_interval_s)
                    steps = self._stepped(resource, Delivery("steps", of_steps, self._troubles))
            except Exception as error:  # noqa: BLE001  # a bad environment must not end a run
                self._troubles.warn(
                    f"exporter not created: {type(error).__name__}",
                    signal=name,
                    endpoint=redacted(otlp.endpoint),
                    reason=str(error),
                )
        if chosen.prometheus is not None:
            readers += self._scraped(chosen.prometheus)
        if readers:
            meters = MeterProvider(readers, resource, shutdown_on_exit=False)
            meters.get_meter("rl-dataplane").create_observable_counter(
                DROPPED,
                [self._observe_dropped],
                unit="{item}",
                description="Spans, events and exports of step metrics that this process lost.",
            )
        providers.use(
            tracers=tracers, loggers=loggers, meters=meters, steps=steps, troubles=self._troubles
        )

    def _traced(
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

    def _logged(self, resource: Resource, delivery: Delivery) -> AnyLoggerProvider:
        provider = LoggerProvider(resource=resource, shutdown_on_exit=False)
        processor = AdmittingLogProcessor(delivery)
        provider.add_log_record_processor(processor)
        self._pipelines["events"] = _Pipeline(delivery, processor.force_flush, processor.shutdown)
        return provider

    def _periodic(self, delivery: Delivery) -> MetricReader:
        reader = PeriodicExportingMetricReader(
            CountedMetricExporter(delivery),
            export_interval_millis=delivery.otlp.interval_s * 1000,
        )
        # Flush this reader only. The provider's flush would also collect for Prometheus, whose
        # reader stores every collection until the next scrape.
        self._pipelines["metrics"] = _Pipeline(delivery, reader.force_flush, reader.shutdown)
        return reader

    def _stepped(self, resource: Resource, delivery: Delivery) -> AnyMeterProvider:
        # With delta temporality the SDK exports a gauge's point once and then forgets its
        # attributes, which differ in each step.
        exporter = CountedMetricExporter(delivery, {_Gauge: AggregationTemporality.DELTA})
        reader = PeriodicExportingMetricReader(exporter, export_interval_millis=math.inf)

        def shutdown() -> None:
            pipeline.flush()  # a reader without an interval does not collect at its shutdown
            reader.shutdown()

        pipeline = _Pipeline(delivery, reader.force_flush, shutdown, polls=True)
        self._pipelines["steps"] = pipeline
        return MeterProvider([reader], resource, shutdown_on_exit=False)

    def _scraped(self, prometheus: Prometheus) -> list[MetricReader]:
        from opentelemetry.exporter.prometheus import PrometheusMetricReader
        from prometheus_client import CollectorRegistry

        from observability.setup.prometheus import scrape_server

        registry = CollectorRegistry()
        try:
            self._server = scrape_server(prometheus.host, prometheus.port, registry)
        except OSError as error:
            self._troubles.warn(
                "prometheus endpoint not opened",
                host=prometheus.host,
                port=prometheus.port,
                reason=str(error),
            )
            return []
        return [PrometheusMetricReader(registry=registry)]

    def _observe_dropped(self, options: CallbackOptions) -> Iterable[Observation]:
        """Yield all counts, also zeros: Prometheus needs a first 0 to see an increase."""
        for name, pipeline in self._pipelines.items():
            if name == "metrics":
                continue
            counts = pipeline.delivery.ledger.counts()
            for reason in ("queue_full", "export_failed", "shutdown"):
                labels = {"dataplane.signal": name, "dataplane.reason": reason}
                yield Observation(counts[reason], labels)

    def _all(self) -> Iterable[_Pipeline]:
        return self._pipelines.values()

    def _failed(self) -> int:
        return sum(each["export_failed"] for each in self.counts().values())

    def _finish(self, deadline: float) -> None:
        for pipeline in self._all():
            pipeline.delivery.finish(deadline)
        self._shutdowns = [each.thread.start(each.shutdown) for each in self._all()]
        if self._server is not None:
            self._server.shutdown()  # returns within a poll interval of 0.1 s
            self._server.server_close()
        if not wait_all(self._shutdowns, deadline):
            self._troubles.warn("shutdown ran out of time")

    def _take_sigterm(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        previous = signal.getsignal(signal.SIGTERM)
        if previous in (signal.SIG_IGN, None):  # None: set by C code and cannot be called
            return
        self._previous = previous
        signal.signal(signal.SIGTERM, self._on_sigterm)

    def _restore_sigterm(self) -> None:
        is_installed = signal.getsignal(signal.SIGTERM) == self._on_sigterm
        if is_installed and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._previous)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        """Export the queued items, then call the previous handler or the default action."""
        terminates = not callable(self._previous)
        if os.getpid() == self._pid and self._on_signal is not None:
            deadline = time.monotonic() + self._timeout_s + 0.5
            if self._ending:  # possibly in the interrupted thread, so do not wait for `_ended`
                wait_all(self._shutdowns, deadline)
            else:
                wait_all(
                    [self._on_signal.start(self.shutdown if terminates else self.flush)], deadline
                )
        if callable(self._previous):
            self._previous(number, frame)
            return
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)


_NOTHING = Ledger(0)


def _resource(arguments: Arguments) -> Resource:
    facts: dict[str, str | bool | int | float] = {
        "telemetry.sdk.language": "python",
        "telemetry.sdk.name": "opentelemetry",
        "telemetry.sdk.version": sdk_version,
        "service.name": "unknown_service",
        "host.name": socket.gethostname(),
        "process.pid": os.getpid(),
    }
    given = dict(arguments.attributes)
    for name, value in (
        ("service.name", arguments.service_name),
        ("service.instance.id", arguments.instance),
        ("rl.run_id", arguments.run_id),
    ):
        if value is not None:
            given[name] = value
    # Not `Resource.create`, which adds a random service.instance.id; here that is the rank.
    return Resource(facts).merge(OTELResourceDetector().detect()).merge(Resource(given))
