"""Exporters and processors around the SDK's, which keep the account of every item.

The order of things: a processor of ours admits an item to the ledger or drops it, the SDK's batch
processor queues it, an exporter of ours takes the batch out of the ledger, the SDK's exporter
encodes it, and `CollectorSession` sends it. Only the last one talks to the network.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import Any, Protocol  # Any: keyword arguments of requests and of the SDK pass through

import requests
import urllib3
from google.protobuf.message import DecodeError
from opentelemetry.context import _SUPPRESS_INSTRUMENTATION_KEY, attach, detach, set_value
from opentelemetry.sdk._logs import LogRecordProcessor, ReadableLogRecord, ReadWriteLogRecord
from opentelemetry.sdk._logs.export import LogRecordExporter, LogRecordExportResult
from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult, MetricsData
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from observability._setup_counts import Ledger, Signal
from observability._setup_troubles import Troubles

_ANSWER_BYTES = 1 << 16
_SHORTEST_S = 0.01
"""Of an attempt: requests takes no timeout of 0, which the SDK asks for when its time is up."""
_AWAY = frozenset({429, 502, 503, 504})
"""What OTLP lets a client try again."""


class NotDelivered(Exception):
    """A request failed in a way that trying again would not help."""


class PartialSuccess(Protocol):
    """Reads how many items a collector rejected from the body of its answer.

    Raises:
        google.protobuf.message.DecodeError: it is not such an answer.
    """

    def __call__(self, answer: bytes, /) -> int: ...


class CollectorSession(requests.Session):
    """What the SDK's exporter sends through, one request at a time.

    The SDK tries again within its timeout, follows the answer of a collector no further than its
    status, and takes a redirection for success. Here a redirection is a failure, rejected items
    are counted, little is read of a long answer, and while a collector keeps failing each batch is
    tried once.

    Attributes:
        once: do not try again.
        deadline: of `time.monotonic`; no request goes on beyond it.
        rejected: items the collector rejected of the last request.
        left_out: items of the last batch that could not be encoded, and were not sent.
        trouble: what went wrong with the last request, kind and details; None if nothing.
        away: whether the last request failed in a way that may pass: nobody answered in time, or
            who did asked for patience.
    """

    def __init__(self, partial_success: PartialSuccess) -> None:
        super().__init__()
        self._partial_success = partial_success
        self._prepared: dict[Hashable, tuple[requests.PreparedRequest, dict[str, Any]]] = {}
        self.once = False
        self.deadline: float | None = None
        self.rejected = 0
        self.left_out = 0
        self.trouble: tuple[str, str] | None = None
        self.away = False

    def leave_out(self, items: int) -> None:
        """Of the batch that is sent next, so many items could not be encoded."""
        self.left_out += items

    def request(self, method: str, url: str | bytes, *args: Any, **kwargs: Any) -> Any:
        """As `requests.Session.request`, with the answer already read.

        Raises:
            NotDelivered: it failed and is not to be tried again.
            requests.RequestException: it failed; the SDK decides whether it tries again.
        """
        self.rejected, self.trouble, self.away = 0, None, False
        timeouts = [] if kwargs.get("timeout") is None else [kwargs["timeout"]]
        if self.deadline is not None:
            timeouts.append(self.deadline - time.monotonic())
        if timeouts:
            kwargs["timeout"] = max(min(timeouts), _SHORTEST_S)
        try:
            answer = self._answer(method, url, *args, **kwargs)
            with answer:
                body = answer.raw.read(_ANSWER_BYTES, decode_content=True)
        except Exception as error:
            self.trouble = _described(error)
            # The body is read past requests, and what urllib3 raises then is its own.
            away = requests.ConnectionError, requests.Timeout, urllib3.exceptions.HTTPError
            self.away = isinstance(error, away) and not isinstance(
                error, requests.exceptions.SSLError
            )
            if self.once or isinstance(error, ValueError):
                raise NotDelivered(self.trouble[0]) from error
            raise
        if answer.status_code < 200 or answer.status_code >= 300:
            self.trouble = f"collector answered {answer.status_code}", str(answer.reason)
            self.away = answer.status_code in _AWAY
            if self.once or answer.status_code < 400:
                raise NotDelivered(self.trouble[0])
            return answer
        try:
            self.rejected = self._partial_success(body)
        except DecodeError:
            self.rejected = 0  # it said 2xx, which is what counts
        if self.rejected:
            self.trouble = "collector rejected a part", f"{self.rejected} items"
        return answer

    def _answer(
        self, method: str, url: str | bytes, *args: Any, **kwargs: Any
    ) -> requests.Response:
        """Send; what is the same each time (headers, proxies, certificates) is prepared once.

        That is half of the time that a request takes.
        """
        plain = {"headers", "data", "timeout", "allow_redirects"} >= kwargs.keys()
        if args or not plain or self.cookies:
            return super().request(method, url, *args, **{**kwargs, "stream": True})
        headers = kwargs.get("headers") or {}
        key = method, url, tuple(headers.items())
        if key not in self._prepared:
            request = self.prepare_request(requests.Request(method, url, headers=headers))
            settings = self.merge_environment_settings(request.url or "", {}, True, None, None)
            self._prepared[key] = request, dict(settings)
        template, settings = self._prepared[key]
        request = template.copy()
        request.prepare_body(kwargs.get("data"), None)
        redirects = kwargs.get("allow_redirects", True)
        return self.send(
            request, timeout=kwargs.get("timeout"), allow_redirects=redirects, **settings
        )


def _described(error: Exception) -> tuple[str, str]:
    if isinstance(error, requests.Timeout):
        return "collector timed out", type(error).__name__
    if isinstance(error, requests.RequestException) and isinstance(error, ValueError):
        return "invalid endpoint", type(error).__name__
    if isinstance(error, requests.ConnectionError):
        inner = error.args[0] if error.args else error
        return "collector is unreachable", str(getattr(inner, "reason", inner))
    return f"export raised {type(error).__name__}", str(error)


class Sender:
    """Exports the batches of one signal and enters into the ledger what became of them.

    A batch that a collector could not take now, since it is away or overloaded, is kept and tried
    again before the next one, and in a thread of its own until then, so that a collector that is
    started again misses nothing. What is kept is half of what may be pending at most, or one batch;
    then the oldest is dropped.

    Args:
        signal: for the warning.
        endpoint: for the warning; without secrets.
        session: through which the exporter sends; None of one that does not use HTTP.
        again_s: seconds after which what is kept is tried again; None to keep nothing. Metrics are
            cumulative: the next ones tell all of it.
    """

    def __init__(
        self,
        signal: Signal,
        endpoint: str,
        *,
        ledger: Ledger,
        troubles: Troubles,
        session: CollectorSession | None,
        again_s: float | None = None,
    ) -> None:
        self._signal = signal
        self._endpoint = endpoint
        self._ledger = ledger
        self._troubles = troubles
        self._session = session
        self._again_s = again_s
        self._start()

    def _start(self) -> None:
        self._failing = False
        self._finishing = threading.Event()
        self._lock = threading.Lock()
        self._kept: deque[tuple[int, Callable[[], bool]]] = deque()
        self._trying_again = False

    def send(self, items: int, export: Callable[[], bool]) -> bool:
        """Export a batch unless it was given up. Returns whether it was exported; never raises."""
        if not self._ledger.take(items):
            return False
        with self._lock:
            self._kept.append((items, export))
            return self._send_kept()

    def send_kept(self) -> bool:
        """Try again what a collector could not take. Returns whether nothing is left of it."""
        if self._ledger.closed:
            return False
        with self._lock:
            self._send_kept()
            return not self._kept

    @property
    def keeps_some(self) -> bool:
        """Whether something is kept, to be tried again."""
        return self._failing and bool(self._kept)

    def disown(self) -> None:
        """In a forked child: what is kept, and the lock, are the parent's."""
        self._start()

    def _send_kept(self) -> bool:
        """The oldest first; after a failure that may pass, the rest stays where it is."""
        exported = True
        while self._kept:
            items, export = self._kept[0]
            found = 0
            try:
                if not (self._finishing.is_set() and self._failing):
                    found = self._attempt(items, export)
            except BaseException:
                self._settle_oldest(0)
                raise
            if self._failing and self._may_pass():
                exported = False
                break
            self._settle_oldest(found)
            exported = found > 0
        most = self._ledger.capacity // 2
        while len(self._kept) > 1 and sum(items for items, _ in self._kept) > most:
            self._settle_oldest(0)
        if self._kept and not self._trying_again:
            thread = threading.Thread(target=self._try_again, name="observability", daemon=True)
            with suppress(RuntimeError):  # a process without threads to spare tries at its next
                thread.start()
                self._trying_again = True
        return exported

    def _try_again(self) -> None:
        """Until nothing is kept, in a thread of its own."""
        while not self._finishing.wait(self._again_s):
            with self._lock:
                if not self._ledger.closed:
                    self._send_kept()
                if self._ledger.closed or not self._kept:
                    self._trying_again = False
                    return

    def _settle_oldest(self, exported: int) -> None:
        items, _ = self._kept.popleft()
        self._ledger.settle(items, exported)

    def _may_pass(self) -> bool:
        """Whether the last failure may, so that what failed is kept."""
        if self._session is None or self._finishing.is_set() or self._again_s is None:
            return False
        return self._session.away

    def finish(self, deadline: float) -> None:
        """From now on nothing takes longer than ``deadline`` (of `time.monotonic`), nothing is
        tried twice, and after the first failure nothing is tried at all."""
        self._failing = False
        self._finishing.set()
        if self._session is not None:
            self._session.deadline = deadline
            self._session.once = True

    def _attempt(self, items: int, export: Callable[[], bool]) -> int:
        session = self._session
        if session is not None:
            session.once = self._failing or self._finishing.is_set()
            session.trouble, session.rejected, session.away = None, 0, False
            session.left_out = 0
        trouble: tuple[str, str] | None = None
        done = False
        # What is tried again is no operation of the application's, either.
        quiet = attach(set_value(_SUPPRESS_INSTRUMENTATION_KEY, True))
        with self._troubles.listening():
            try:
                done = export()
            except Exception as error:  # noqa: BLE001  # an exporter may raise what it likes
                trouble = f"export raised {type(error).__name__}", str(error)
            finally:
                detach(quiet)
            heard = self._troubles.heard()
        if session is not None:
            trouble = trouble or session.trouble
        if not done and not self._ledger.closed:
            trouble = trouble or ("export failed", heard)
        self._failing = not done
        if trouble is not None:
            self._troubles.tell(
                trouble[0], signal=self._signal, endpoint=self._endpoint, reason=trouble[1]
            )
        lost = 0
        if session is not None:
            lost = session.rejected + session.left_out
            if session.left_out:
                self._troubles.tell(
                    "items cannot be encoded",
                    signal=self._signal,
                    reason=f"{session.left_out} of a batch of {items}",
                )
        return max(items - lost, 0) if done else 0


class CountingSpanExporter(SpanExporter):
    """Sends spans through a `Sender`."""

    def __init__(self, exporter: SpanExporter, sender: Sender) -> None:
        self._exporter = exporter
        self._sender = sender

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Export, whatever happens without raising."""

        def export() -> bool:
            return self._exporter.export(spans) is SpanExportResult.SUCCESS

        sent = self._sender.send(len(spans), export)
        return SpanExportResult.SUCCESS if sent else SpanExportResult.FAILURE

    def shutdown(self) -> None:
        """Try what is kept for the last time, and shut the exporter down."""
        self._sender.send_kept()
        self._exporter.shutdown()


class CountingLogExporter(LogRecordExporter):
    """Sends log records through a `Sender`."""

    def __init__(self, exporter: LogRecordExporter, sender: Sender) -> None:
        self._exporter = exporter
        self._sender = sender

    def export(self, batch: Sequence[ReadableLogRecord]) -> LogRecordExportResult:
        """Export, whatever happens without raising."""

        def export() -> bool:
            return self._exporter.export(batch) is LogRecordExportResult.SUCCESS

        sent = self._sender.send(len(batch), export)
        return LogRecordExportResult.SUCCESS if sent else LogRecordExportResult.FAILURE

    def shutdown(self) -> None:
        """Try what is kept for the last time, and shut the exporter down."""
        self._sender.send_kept()
        self._exporter.shutdown()  # type: ignore[no-untyped-call]  # as the SDK declares it

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Nothing is kept here."""
        return True


class CountingMetricExporter(MetricExporter):
    """Sends metrics through a `Sender`; an item is one export of all of them."""

    def __init__(self, exporter: MetricExporter, sender: Sender, ledger: Ledger) -> None:
        # A metric reader asks its exporter for these two, which have no public name.
        super().__init__(
            preferred_temporality=exporter._preferred_temporality,
            preferred_aggregation=exporter._preferred_aggregation,
        )
        self._exporter = exporter
        self._sender = sender
        self._ledger = ledger

    def export(
        self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any
    ) -> MetricExportResult:
        """Export, whatever happens without raising."""

        def export() -> bool:
            result = self._exporter.export(metrics_data, timeout_millis, **kwargs)
            return result is MetricExportResult.SUCCESS

        sent = self._ledger.admit() and self._sender.send(1, export)
        return MetricExportResult.SUCCESS if sent else MetricExportResult.FAILURE

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        """Nothing is kept here."""
        return True

    def shutdown(self, timeout_millis: float = 30_000, **kwargs: Any) -> None:
        """Shut the exporter down."""
        self._exporter.shutdown(timeout_millis, **kwargs)


class AdmittingSpanProcessor(SpanProcessor):
    """Hands a sampled span that ended to a batch processor, unless the ledger is full or closed."""

    def __init__(self, processor: SpanProcessor, ledger: Ledger, troubles: Troubles) -> None:
        self._processor = processor
        self._ledger = ledger
        self._troubles = troubles

    def on_end(self, span: ReadableSpan) -> None:
        """Admit and queue, or drop."""
        if span.context is None or not span.context.trace_flags.sampled:
            return
        if self._ledger.admit():
            self._processor.on_end(span)
        elif not self._ledger.closed:
            self._troubles.tell("queue full", signal="spans")

    def shutdown(self) -> None:
        """Export what is queued, then end."""
        self._processor.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Export what is queued."""
        return self._processor.force_flush(timeout_millis)


class AdmittingLogProcessor(LogRecordProcessor):
    """Hands a log record to a batch processor, unless the ledger is full or closed."""

    def __init__(self, processor: LogRecordProcessor, ledger: Ledger, troubles: Troubles) -> None:
        self._processor = processor
        self._ledger = ledger
        self._troubles = troubles

    def on_emit(self, log_record: ReadWriteLogRecord) -> None:
        """Admit and queue, or drop."""
        if self._ledger.admit():
            self._processor.on_emit(log_record)
        elif not self._ledger.closed:
            self._troubles.tell("queue full", signal="events")

    def shutdown(self) -> None:
        """Export what is queued, then end."""
        self._processor.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Export what is queued."""
        return self._processor.force_flush(timeout_millis)
