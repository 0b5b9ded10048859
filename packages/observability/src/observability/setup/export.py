"""Export of spans, log records and metrics by the SDK, with a count of every item.

processor, drops items that the counter does not admit
  --> queue of the SDK
    --> exporter, passes each batch to its `Delivery`
      --> export method of the SDK, encodes and sends the batch
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import copy_context
from typing import Any  # Any: keyword arguments of the SDK pass through

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk._logs import ReadableLogRecord, ReadWriteLogRecord
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor, LogRecordExportResult
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    MetricExportResult,
    MetricsData,
)
from opentelemetry.sdk.trace import ReadableSpan, Span
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult

from observability.setup.counts import ItemCounter, Signal
from observability.setup.session import CollectorSession
from observability.setup.settings import Otlp, redacted
from observability.setup.warning_log import WarningLog
from observability.wire import OtlpSignal

_OTLP_SIGNALS: dict[Signal, OtlpSignal] = {
    "spans": "traces",
    "events": "logs",
    "metrics": "metrics",
    "steps": "metrics",
}


class Delivery:
    """The sender of the batches of one signal; it counts their outcomes.

    If the collector is unreachable or overloaded, a batch is retained and retried before the next
    one, so that a collector that restarts receives it. Retained batches hold at most half the
    queue's capacity, and at least one batch, whatever its size. Beyond that, the oldest is dropped.
    Batches of metrics are not retained.

    Args:
        signal: name of the signal in warnings.
        otlp: settings of the export.
        warning_log: logger of the warnings.

    Attributes:
        counter: counts of the items.
        session: the HTTP session that the SDK's exporter must use.
    """

    def __init__(self, signal: Signal, otlp: Otlp, warning_log: WarningLog) -> None:
        self.counter = ItemCounter(otlp.queue)
        self.session = CollectorSession(_OTLP_SIGNALS[signal])
        self.otlp = otlp
        self.warning_log = warning_log
        self._signal = signal
        # Metrics are cumulative: the next export includes the values of a failed one.
        self._retains = signal != "metrics"
        self._reset()

    def _reset(self) -> None:
        self._is_failing = self._is_shutting_down = False
        self._lock = threading.Lock()
        self._batches: deque[tuple[Sequence[Any], Callable[[Sequence[Any]], bool]]] = deque()

    @property
    def has_retained(self) -> bool:
        """True while a batch is retained for a retry."""
        return self._is_failing and bool(self._batches)

    def send(self, batch: Sequence[Any], export: Callable[[Sequence[Any]], bool]) -> bool:
        """Send a batch after the retained batches, without raising.

        Args:
            batch: spans, log records, or one set of metrics.
            export: function that encodes and sends a part of the batch. It returns whether the
                collector accepted the part.

        Returns:
            True if the batch and all retained batches were exported.
        """
        if not self.counter.begin_export(len(batch)):
            return False
        with self._lock:
            # The SDK has turned off tracing in this context, so that exports are not traced. A
            # retry must run in the same context.
            context = copy_context()
            self._batches.append((batch, lambda part: context.run(export, part)))
            return self._send_all()

    def retry(self) -> None:
        """Send the retained batches."""
        with self._lock:
            if not self.counter.closed:
                self._send_all()

    def begin_shutdown(self, deadline: float) -> None:
        """Retain nothing from now on, and send nothing after the next failure.

        Every request ends at ``deadline``, a time of `time.monotonic`.
        """
        self._is_failing, self._is_shutting_down = False, True
        self.session.deadline = deadline

    def reset_after_fork(self) -> None:
        """Discard the parent's batches, counts and locks in a forked child."""
        self.counter.reset_after_fork()
        self._reset()

    def _send_all(self) -> bool:
        """Send the batches, oldest first; at a transient failure, stop and retain the rest."""
        all_sent = True
        while self._batches:
            batch, export = self._batches[0]
            drops = self._is_shutting_down and self._is_failing
            exported = 0 if drops else self._attempt(batch, export)
            may_retain = self._retains and not self._is_shutting_down
            if self._is_failing and self.session.is_transient and may_retain:
                all_sent = False
                break
            self._batches.popleft()
            self.counter.end_export(len(batch), exported)
            all_sent = all_sent and exported == len(batch)
        retained = sum(len(batch) for batch, _ in self._batches)
        while len(self._batches) > 1 and retained > self.counter.capacity // 2:
            dropped = len(self._batches.popleft()[0])
            self.counter.end_export(dropped, 0)
            retained -= dropped
        return all_sent

    def _attempt(self, batch: Sequence[Any], export: Callable[[Sequence[Any]], bool]) -> int:
        """Send a batch once; return how many of its items were exported."""
        session = self.session
        session.reset()
        session.no_retry = self._is_failing or self._is_shutting_down
        self.warning_log.exporter_message = ""
        try:
            accepted = export(batch)
        except Exception as error:  # noqa: BLE001  # an exporter may raise anything
            accepted, trouble = False, (f"export raised {type(error).__name__}", str(error))
        else:
            trouble = session.trouble or ("items not exported", self.warning_log.exporter_message)
        if not accepted and not session.is_sent and len(batch) > 1:
            # No request was sent: an item cannot be encoded. Bisection isolates it.
            middle = len(batch) // 2
            halves = batch[:middle], batch[middle:]
            exported = sum(self._attempt(half, export) for half in halves)
            session.is_transient = False  # a retry would send parts of the batch again
            return exported
        self._is_failing = not accepted and session.is_sent
        if (not accepted and not self.counter.closed) or session.rejected:
            endpoint = redacted(self.otlp.endpoint)
            self.warning_log.warn(
                trouble[0], signal=self._signal, endpoint=endpoint, reason=trouble[1]
            )
        return max(len(batch) - session.rejected, 0) if accepted else 0


class _Counted:
    """A mixin that makes an SDK exporter send through a `Delivery`; list it as the first base."""

    def __init__(self, delivery: Delivery) -> None:
        otlp = delivery.otlp
        self.delivery = delivery
        super().__init__(otlp.endpoint, timeout=otlp.timeout_s, session=delivery.session)  # type: ignore[call-arg]

    def shutdown(self) -> None:
        """Retry the retained batches one last time, then shut down."""
        self.delivery.retry()
        super().shutdown()  # type: ignore[misc]


class CountedSpanExporter(_Counted, OTLPSpanExporter):
    """An exporter of spans that counts them."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Export spans without raising."""
        export = super().export
        sent = self.delivery.send(spans, lambda part: export(part) is SpanExportResult.SUCCESS)
        return SpanExportResult.SUCCESS if sent else SpanExportResult.FAILURE


class CountedLogExporter(_Counted, OTLPLogExporter):
    """An exporter of log records that counts them."""

    def export(self, batch: Sequence[ReadableLogRecord]) -> LogRecordExportResult:
        """Export log records without raising."""
        export = super().export
        sent = self.delivery.send(batch, lambda part: export(part) is LogRecordExportResult.SUCCESS)
        return LogRecordExportResult.SUCCESS if sent else LogRecordExportResult.FAILURE


class CountedMetricExporter(OTLPMetricExporter):
    """An exporter of metrics that counts its exports.

    Args:
        delivery: the sender.
        temporality: preferred temporality by class of instrument; None is the SDK's default.
    """

    def __init__(
        self,
        delivery: Delivery,
        temporality: dict[type, AggregationTemporality] | None = None,
    ) -> None:
        otlp = delivery.otlp
        super().__init__(
            otlp.endpoint,
            timeout=otlp.timeout_s,
            session=delivery.session,
            preferred_temporality=temporality,
        )
        self.delivery = delivery

    def export(
        self, metrics_data: MetricsData, timeout_millis: float | None = 10_000, **kwargs: Any
    ) -> MetricExportResult:
        """Export metrics without raising."""
        export = super().export

        def send(part: Sequence[MetricsData]) -> bool:
            return export(part[0], timeout_millis, **kwargs) is MetricExportResult.SUCCESS

        sent = self.delivery.counter.admit() and self.delivery.send([metrics_data], send)
        return MetricExportResult.SUCCESS if sent else MetricExportResult.FAILURE


class AdmittingSpanProcessor(BatchSpanProcessor):
    """A processor of finished sampled spans, which drops them if the queue is full or shut down."""

    def __init__(self, delivery: Delivery) -> None:
        super().__init__(CountedSpanExporter(delivery), **delivery.otlp.batching)
        self._delivery = delivery

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Make the name of the span encodable as UTF-8."""
        name = replace_surrogates(span.name)
        if name is not span.name:
            span.update_name(name)

    def on_end(self, span: ReadableSpan) -> None:
        """Queue or drop the span."""
        if span.context is not None and span.context.trace_flags.sampled and admit(self._delivery):
            super().on_end(span)


class AdmittingLogProcessor(BatchLogRecordProcessor):
    """A processor of log records, which drops them if the queue is full or shut down."""

    def __init__(self, delivery: Delivery) -> None:
        super().__init__(CountedLogExporter(delivery), **delivery.otlp.batching)
        self._delivery = delivery

    def on_emit(self, log_record: ReadWriteLogRecord) -> None:
        """Queue or drop the log record."""
        if admit(self._delivery):
            log_record.log_record.body = replace_surrogates(log_record.log_record.body)
            super().on_emit(log_record)


def replace_surrogates(value: Any) -> Any:
    """Replace each lone surrogate of a string, which UTF-8 cannot encode, by a question mark."""
    if not isinstance(value, str) or value.isascii():
        return value
    return value.encode(errors="replace").decode()


def admit(delivery: Delivery) -> bool:
    """Count an item as recorded; return whether to queue it, and warn if the queue is full."""
    if delivery.counter.admit():
        return True
    if not delivery.counter.closed:
        delivery.warning_log.warn("queue full", signal=delivery._signal)
    return False
