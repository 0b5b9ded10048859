"""`Telemetry`: the providers of one process, from set-up to the last export.

Whatever may wait runs in daemon threads that are waited for with a deadline, because the SDK's own
flush and shutdown take as long as the network likes. That also keeps the SIGTERM handler safe: it
runs between two instructions of the main thread and must not ask for a lock that this may hold.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any  # Any: prometheus_client's server has no public type

import structlog
from opentelemetry._logs import LoggerProvider as AnyLoggerProvider
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
from opentelemetry.sdk.version import __version__ as sdk_version
from opentelemetry.trace import TracerProvider as AnyTracerProvider

from observability import _setup_globals
from observability._setup_baggage import BaggageProcessor
from observability._setup_counts import Counts, Ledger, Signal
from observability._setup_events import LeanLogExporter, LeanLoggerProvider
from observability._setup_export import (
    AdmittingLogProcessor,
    AdmittingSpanProcessor,
    CollectorSession,
    CountingLogExporter,
    CountingMetricExporter,
    CountingSpanExporter,
    Sender,
)
from observability._setup_settings import Arguments, Otlp, Prometheus, settings, shown
from observability._setup_span_export import LeanSpanExporter
from observability._setup_spans import LeanTracerProvider
from observability._setup_threads import Over, ReadyThreads, all_over
from observability._setup_troubles import Troubles, quieten
from observability.lane import Lane

DROPPED = "dataplane.telemetry.dropped"
"""Name of the metric that tells what is lost; docs/telemetry.md lists it."""

logger = structlog.get_logger("observability")


@dataclass(frozen=True)
class _Pipeline:
    """One signal on its way out."""

    sender: Sender
    ledger: Ledger
    flush: Callable[[], object]
    shutdown: Callable[[], object]


class Telemetry:
    """What `observability.setup` returns. Every method may be called from any thread.

    Nothing that it does to a run can fail or wait longer than the time it is given: queues are
    bounded, what does not fit or is not taken by a collector is dropped and counted, and each kind
    of trouble is told by one warning of the structlog logger ``observability``.

    Used as a context manager it shuts down at the end.
    """

    def __init__(self, arguments: Arguments) -> None:
        self._pid = os.getpid()
        self._timeout_s = arguments.shutdown_timeout_s
        self._troubles = Troubles()
        quieten(self._troubles)
        self._ledgers: dict[Signal, Ledger] = {}
        self._pipelines: list[_Pipeline] = []
        self._flushing = threading.Lock()
        self._flushes: list[Over] = []  # those of the last flush
        self._lock = threading.Lock()
        self._ending = False
        self._ended = threading.Event()
        self._last: list[Over] = []  # those of shutdown
        self._lane: Lane | None = None
        self._server: Any = None
        self._address: tuple[str, int] | None = None
        self._previous: Callable[[int, FrameType | None], object] | int | None = None
        self._start(arguments)
        # A flush may hang while the end begins: of the pipelines, the lane, the server, and of the
        # SIGTERM that asks for them. There are none where nothing is recorded.
        self._threads = ReadyThreads(0 if self._lane is None else 2 * len(self._pipelines) + 3)
        atexit.register(self.shutdown)
        self._take_sigterm()

    @property
    def prometheus_address(self) -> tuple[str, int] | None:
        """Host and port where metrics can be scraped; None if nowhere."""
        return self._address

    @property
    def ended(self) -> bool:
        """Whether `shutdown` was called."""
        return self._ending

    def counts(self) -> dict[Signal, Counts]:
        """What was made, exported and dropped so far, per signal.

        Of a signal that is not exported over OTLP everything is 0: it is not even made.
        """
        return {
            name: self._ledgers.get(name, _NOTHING).counts()
            for name in ("spans", "events", "metrics")
        }

    def flush(self, timeout_s: float | None = None) -> bool:
        """Export what is queued.

        Args:
            timeout_s: longest wait in seconds; None is the shutdown timeout.

        Returns:
            True if everything that was queued has been accepted by a collector; False if the time
            ran out, an export failed meanwhile or is to be tried again, or shutdown gave something
            up, which is counted.
        """
        timeout_s = max(self._timeout_s if timeout_s is None else timeout_s, 0)
        deadline = time.monotonic() + timeout_s
        failures = self._failures()
        # One flush at a time, also after one that ran out of time: else the threads of impatient
        # callers would pile up.
        if not self._flushing.acquire(timeout=timeout_s):
            return False
        try:
            if not all_over(self._flushes, deadline):
                return False
            if not self._ending:
                self._flushes = self._threads.start(each.flush for each in self._pipelines)
            done = all_over(self._flushes, deadline)
        finally:
            self._flushing.release()
        if self._ending:  # then it is shutdown that sends, or gives up, what is queued
            done = self._ended.wait(max(deadline - time.monotonic(), 0))
            done = done and not any(each["shutdown"] for each in self.counts().values())
        kept = any(pipeline.sender.keeps_some for pipeline in self._pipelines)
        return done and not kept and self._failures() == failures

    def shutdown(self, timeout_s: float | None = None) -> None:
        """Export what is queued and end; whatever is made later is dropped and counted.

        A second call waits for the first one. Logs one line if anything was dropped.

        Args:
            timeout_s: longest wait in seconds; None is the shutdown timeout of the set-up. What is
                still pending then is dropped.
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
            for ledger in self._ledgers.values():
                ledger.close()
            self._ended.set()
            self._threads.close()
            atexit.unregister(self.shutdown)
            self._give_back_sigterm()
        self.report()

    def report(self) -> None:
        """Log one line, ``telemetry_dropped``, if anything was dropped so far."""
        dropped = {name: each for name, each in self.counts().items() if each["dropped"]}
        if dropped:
            with suppress(Exception):  # an application's log processors raise what they like
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
        """In a forked child: let go of what is the parent's, without a lock or a byte sent."""
        for ledger in self._ledgers.values():
            ledger.disown()
        for pipeline in self._pipelines:
            pipeline.sender.disown()
        self._flushing, self._lock = threading.Lock(), threading.Lock()
        self._flushes.clear()
        self._ending = True
        self._ended = threading.Event()
        self._ended.set()
        if self._server is not None:
            os.close(self._server.socket.detach())

    def _start(self, arguments: Arguments) -> None:
        asked = settings(arguments, self._troubles)
        resource = _resource(arguments)
        tracers = loggers = meters = None
        readers: list[MetricReader] = []
        if asked.otlp or asked.prometheus is not None:
            self._lane = Lane()
        for name, otlp in asked.otlp.items():
            try:
                if name == "spans":
                    tracers = self._traced(resource, arguments, otlp)
                elif name == "events":
                    loggers = self._logged(resource, otlp)
                else:
                    readers.append(self._periodic(otlp))
            except Exception as error:  # noqa: BLE001  # a bad environment must not end a run
                self._troubles.tell(
                    f"exporter not made: {type(error).__name__}",
                    signal=name,
                    endpoint=shown(otlp.endpoint),
                    reason=str(error),
                )
        if asked.prometheus is not None:
            readers += self._scraped(asked.prometheus)
        if readers:
            meters = MeterProvider(readers, resource, shutdown_on_exit=False)
            meters.get_meter("rl-dataplane").create_observable_counter(
                DROPPED,
                [self._observe_dropped],
                unit="{item}",
                description="Spans and events that this process made and could not hand over.",
            )
        _setup_globals.use(
            tracers=tracers,
            loggers=loggers,
            meters=meters,
            lane=self._lane,
            troubles=self._troubles,
        )

    def _traced(self, resource: Resource, arguments: Arguments, otlp: Otlp) -> AnyTracerProvider:
        session = CollectorSession(_rejected_spans)
        exporter = OTLPSpanExporter(otlp.endpoint, timeout=otlp.timeout_s, session=session)
        ledger, sender = self._account("spans", otlp, session)
        batches = BatchSpanProcessor(
            CountingSpanExporter(LeanSpanExporter(exporter, session.leave_out), sender),
            max_queue_size=otlp.queue,
            schedule_delay_millis=otlp.interval_s * 1000,
            max_export_batch_size=otlp.batch,
        )
        ratio = arguments.sample_ratio
        provider = TracerProvider(
            sampler=None if ratio is None else ParentBasedTraceIdRatio(ratio),
            resource=resource,
            shutdown_on_exit=False,
        )
        provider.add_span_processor(BaggageProcessor())
        admitting = AdmittingSpanProcessor(batches, ledger, self._troubles)
        provider.add_span_processor(admitting)
        self._add_pipeline(sender, ledger, provider.force_flush, provider.shutdown)
        return LeanTracerProvider(provider, admitting)

    def _logged(self, resource: Resource, otlp: Otlp) -> AnyLoggerProvider:
        session = CollectorSession(_rejected_logs)
        exporter = OTLPLogExporter(otlp.endpoint, timeout=otlp.timeout_s, session=session)
        ledger, sender = self._account("events", otlp, session)
        lean = LeanLogExporter(exporter, session.leave_out)
        batches = BatchLogRecordProcessor(
            CountingLogExporter(lean, sender),
            schedule_delay_millis=otlp.interval_s * 1000,
            max_export_batch_size=otlp.batch,
            max_queue_size=otlp.queue,
        )
        provider = LoggerProvider(resource=resource, shutdown_on_exit=False)
        admitting = AdmittingLogProcessor(batches, ledger, self._troubles)
        provider.add_log_record_processor(admitting)
        self._add_pipeline(sender, ledger, provider.force_flush, provider.shutdown)
        return LeanLoggerProvider(provider, admitting, resource) if lean.takes_encoded else provider

    def _periodic(self, otlp: Otlp) -> MetricReader:
        session = CollectorSession(_rejected_points)
        exporter = OTLPMetricExporter(otlp.endpoint, timeout=otlp.timeout_s, session=session)
        ledger, sender = self._account("metrics", otlp, session)
        reader = PeriodicExportingMetricReader(
            CountingMetricExporter(exporter, sender, ledger),
            export_interval_millis=otlp.interval_s * 1000,
        )
        # The reader's flush, not the provider's: that one also collects for Prometheus, whose
        # reader keeps every collection until the next scrape.
        self._add_pipeline(sender, ledger, reader.force_flush, reader.shutdown)
        return reader

    def _add_pipeline(
        self,
        sender: Sender,
        ledger: Ledger,
        flush: Callable[[], object],
        shutdown: Callable[[], object],
    ) -> None:
        """What is in the lane comes before what is queued."""

        def drain_and_flush() -> None:
            self._drain()
            flush()
            sender.send_kept()  # nothing was queued, perhaps

        def end_lane_and_shutdown() -> None:
            self._end_lane()
            shutdown()

        self._pipelines.append(_Pipeline(sender, ledger, drain_and_flush, end_lane_and_shutdown))

    def _account(
        self, name: Signal, otlp: Otlp, session: CollectorSession
    ) -> tuple[Ledger, Sender]:
        ledger = self._ledgers[name] = Ledger(otlp.queue)
        sender = Sender(
            name,
            shown(otlp.endpoint),
            ledger=ledger,
            troubles=self._troubles,
            session=session,
            again_s=None if name == "metrics" else otlp.interval_s,
        )
        return ledger, sender

    def _scraped(self, prometheus: Prometheus) -> list[MetricReader]:
        from opentelemetry.exporter.prometheus import PrometheusMetricReader
        from prometheus_client import CollectorRegistry, Metric, start_http_server

        drain = self._drain

        class Registry(CollectorRegistry):
            def collect(self) -> Iterator[Metric]:
                drain()
                yield from super().collect()

        registry = Registry()
        try:
            self._server, _ = start_http_server(prometheus.port, prometheus.host, registry)
        except OSError as error:
            self._troubles.tell(
                "prometheus endpoint not opened",
                host=prometheus.host,
                port=prometheus.port,
                reason=str(error),
            )
            return []
        self._address = self._server.server_address[:2]
        return [PrometheusMetricReader(registry=registry)]

    def _observe_dropped(self, options: CallbackOptions) -> Iterable[Observation]:
        """Zeros too: of a series that begins with a loss, Prometheus sees no increase."""
        for signal_name in ("spans", "events"):
            if signal_name not in self._ledgers:
                continue
            counts = self._ledgers[signal_name].counts()
            for reason in ("queue_full", "export_failed", "shutdown"):
                labels = {"dataplane.signal": signal_name, "dataplane.reason": reason}
                yield Observation(counts[reason], labels)

    def _drain(self) -> None:
        if self._lane is not None:
            self._lane.drain()

    def _end_lane(self) -> None:
        if self._lane is not None:
            self._lane.close()

    def _finish(self, deadline: float) -> None:
        for pipeline in self._pipelines:
            pipeline.sender.finish(deadline)
        actions = [each.shutdown for each in self._pipelines]
        if self._lane is not None:
            actions.insert(0, self._lane.close)
        if self._server is not None:
            actions.append(self._server.shutdown)
        self._last = self._threads.start(actions)
        if not all_over(self._last, deadline):
            self._troubles.tell("shutdown ran out of time")
        if self._server is not None:
            self._server.server_close()

    def _failures(self) -> int:
        return sum(ledger.failures for ledger in self._ledgers.values())

    def _take_sigterm(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        previous = signal.getsignal(signal.SIGTERM)
        if previous in (signal.SIG_IGN, None):  # None: set by C code, which cannot be chained to
            return
        self._previous = previous
        signal.signal(signal.SIGTERM, self._on_sigterm)

    def _give_back_sigterm(self) -> None:
        ours = signal.getsignal(signal.SIGTERM) == self._on_sigterm
        if ours and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._previous)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        """Export what is queued, then do what would have been done without us."""
        dies = not callable(self._previous)
        if os.getpid() == self._pid and self._lane is not None:
            deadline = time.monotonic() + self._timeout_s + 0.5
            if self._ending:  # by the very thread that is interrupted here, perhaps
                all_over(self._last, deadline)
            else:
                all_over(self._threads.start([self.shutdown if dies else self.flush]), deadline)
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
    # Not `Resource.create`, which makes up a random service.instance.id: with us it is a rank.
    return Resource(facts).merge(OTELResourceDetector().detect()).merge(Resource(given))


def _rejected_spans(answer: bytes) -> int:
    return ExportTraceServiceResponse.FromString(answer).partial_success.rejected_spans


def _rejected_logs(answer: bytes) -> int:
    return ExportLogsServiceResponse.FromString(answer).partial_success.rejected_log_records


def _rejected_points(answer: bytes) -> int:
    # An item is one export here: it counts as rejected if any of its points was.
    rejected = ExportMetricsServiceResponse.FromString(answer).partial_success
    return min(rejected.rejected_data_points, 1)
