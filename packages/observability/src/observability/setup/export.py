"""Export of one signal: the SDK's processor and exporter, and a count of every item.

A processor admits an item to the ledger or drops it; the SDK queues and batches it. The exporter
passes the batch to `Delivery`, which lets the SDK encode and send it and counts the outcome.
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

from observability.setup.ledger import Ledger, Signal
from observability.setup.session import CollectorSession
from observability.setup.settings import Otlp, redacted
from observability.setup.troubles import Troubles
from observability.wire import Kind

_KIND: dict[Signal, Kind] = {
    "spans": "traces",
    "events": "logs",
    "metrics": "metrics",
    "steps": "metrics",
}


class Delivery:
    """The sender of the batches of one signal; it records their outcomes in the ledger.

    If the collector is unreachable or overloaded, a batch is retained and retried before the next
    one, so that a restarted collector misses nothing. At most half of the queue, or one batch, is
    retained; beyond that the oldest batch is dropped.

    Args:
        signal: name of the signal in warnings.
        otlp: settings of the export.
        troubles: logger of the warnings.

    Attributes:
        ledger: the account of the items.
        session: the HTTP session that the SDK's exporter must use.
    """

    def __init__(self, signal: Signal, otlp: Otlp, troubles: Troubles) -> None:
        self.ledger = Ledger(otlp.queue)
        self.session = CollectorSession(_KIND[signal])
        self.otlp = otlp
        self.troubles = troubles
        self._signal = signal
        # Metrics are cumulative: the next export contains all of a failed one.
        self._retains = signal != "metrics"
        self._start()

    def _start(self) -> None:
        self._failing = self._finishing = False
        self._lock = threading.Lock()
        self._batches: deque[tuple[Sequence[Any], Callable[[Sequence[Any]], bool]]] = deque()

    @property
    def has_retained(self) -> bool:
        """True while a batch is retained for a retry."""
        return self._failing and bool(self._batches)

    def send(self, batch: Sequence[Any], export: Callable[[Sequence[Any]], bool]) -> bool:
        """Send a batch after the retained ones. Never raise.

        Args:
            batch: spans, log records, or one set of metrics.
            export: function that encodes and sends a part; returns whether it was accepted.

        Returns:
            True if all items were exported.
        """
        if not self.ledger.take(len(batch)):
            return False
        with self._lock:
            # The SDK disables tracing in the context of an export; a retry needs the same one.
            context = copy_context()
            self._batches.append((batch, lambda part: context.run(export, part)))
            return self._send_all()

    def retry(self) -> None:
        """Send the retained batches."""
        with self._lock:
            if not self.ledger.closed:
                self._send_all()

    def finish(self, deadline: float) -> None:
        """Start the shutdown: retain nothing and give up after the first failure.

        No request continues beyond ``deadline`` of `time.monotonic`.
        """
        self._failing, self._finishing = False, True
        self.session.deadline = deadline

    def disown(self) -> None:
        """Discard the parent's batches, account and locks in a forked child."""
        self.ledger.disown()
        self._start()

    def _send_all(self) -> bool:
        """Send the oldest batch first; stop at a transient failure and retain the rest."""
        all_sent = True
        while self._batches:
            batch, export = self._batches[0]
            sent = 0 if self._finishing and self._failing else self._attempt(batch, export)
            if self._failing and self.session.transient and self._retains and not self._finishing:
                all_sent = False
                break
            self._batches.popleft()
            self.ledger.record_outcome(len(batch), sent)
            all_sent = all_sent and sent == len(batch)
        retained = sum(len(batch) for batch, _ in self._batches)
        while len(self._batches) > 1 and retained > self.ledger.capacity // 2:
            dropped = len(self._batches.popleft()[0])
            self.ledger.record_outcome(dropped, 0)
            retained -= dropped
        return all_sent

    def _attempt(self, batch: Sequence[Any], export: Callable[[Sequence[Any]], bool]) -> int:
        """Return how many items of a batch were exported."""
        session = self.session
        session.reset()
        session.once = self._failing or self._finishing
        self.troubles.exporter_message = ""
        try:
            done = export(batch)
        except Exception as error:  # noqa: BLE001  # an exporter may raise anything
            done, trouble = False, (f"export raised {type(error).__name__}", str(error))
        else:
            trouble = session.trouble or ("items not exported", self.troubles.exporter_message)
        if not done and not session.sent and len(batch) > 1:
            # Nothing was sent: an item cannot be encoded. Find it by bisection.
            middle = len(batch) // 2
            sent = sum(self._attempt(half, export) for half in (batch[:middle], batch[middle:]))
            session.transient = False  # a retry would send parts of the batch again
            return sent
        self._failing = not done and session.sent > 0
        if (not done and not self.ledger.closed) or session.rejected:
            endpoint = redacted(self.otlp.endpoint)
            self.troubles.warn(
                trouble[0], signal=self._signal, endpoint=endpoint, reason=trouble[1]
            )
        return max(len(batch) - session.rejected, 0) if done else 0


class _Counted:
    """A mixin, listed before an SDK exporter, that makes it send through a `Delivery`."""

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
        """Export without raising."""
        export = super().export
        sent = self.delivery.send(spans, lambda part: export(part) is SpanExportResult.SUCCESS)
        return SpanExportResult.SUCCESS if sent else SpanExportResult.FAILURE


class CountedLogExporter(_Counted, OTLPLogExporter):
    """An exporter of log records that counts them."""

    def export(self, batch: Sequence[ReadableLogRecord]) -> LogRecordExportResult:
        """Export without raising."""
        export = super().export
        sent = self.delivery.send(batch, lambda part: export(part) is LogRecordExportResult.SUCCESS)
        return LogRecordExportResult.SUCCESS if sent else LogRecordExportResult.FAILURE


class CountedMetricExporter(OTLPMetricExporter):
    """An exporter of metrics that counts the exports.

    Args:
        delivery: the sender.
        temporality: preferred temporality by class of instrument, see the SDK's exporter.
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
        """Export without raising."""
        export = super().export

        def send(part: Sequence[MetricsData]) -> bool:
            return export(part[0], timeout_millis, **kwargs) is MetricExportResult.SUCCESS

        sent = self.delivery.ledger.admit() and self.delivery.send([metrics_data], send)
        return MetricExportResult.SUCCESS if sent else MetricExportResult.FAILURE


class AdmittingSpanProcessor(BatchSpanProcessor):
    """A processor that queues finished sampled spans, unless the ledger is full or closed."""

    def __init__(self, delivery: Delivery) -> None:
        super().__init__(CountedSpanExporter(delivery), **delivery.otlp.batching)
        self._delivery = delivery

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Make the name encodable as UTF-8."""
        if encodable(span.name) is not span.name:
            span.update_name(encodable(span.name))

    def on_end(self, span: ReadableSpan) -> None:
        """Queue or drop."""
        if span.context is not None and span.context.trace_flags.sampled and admit(self._delivery):
            super().on_end(span)


class AdmittingLogProcessor(BatchLogRecordProcessor):
    """A processor that queues log records, unless the ledger is full or closed."""

    def __init__(self, delivery: Delivery) -> None:
        super().__init__(CountedLogExporter(delivery), **delivery.otlp.batching)
        self._delivery = delivery

    def on_emit(self, log_record: ReadWriteLogRecord) -> None:
        """Queue or drop."""
        if admit(self._delivery):
            log_record.log_record.body = encodable(log_record.log_record.body)
            super().on_emit(log_record)


def encodable(value: Any) -> Any:
    """Return a string with each lone surrogate, which UTF-8 cannot encode, as a question mark."""
    if not isinstance(value, str) or value.isascii():
        return value
    return value.encode(errors="replace").decode()


def admit(delivery: Delivery) -> bool:
    """Admit an item to the ledger and return whether it fitted; warn if the queue is full."""
    if delivery.ledger.admit():
        return True
    if not delivery.ledger.closed:
        delivery.troubles.warn("queue full", signal=delivery._signal)
    return False
