"""The account of what is exported, around the SDK's own processors and exporters."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import (
    BatchLogRecordProcessor,
    InMemoryLogRecordExporter,
    LogRecordExporter,
)
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricExporter, PeriodicExportingMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from structlog.testing import capture_logs

from observability._setup_counts import Ledger
from observability._setup_export import (
    AdmittingLogProcessor,
    AdmittingSpanProcessor,
    CountingLogExporter,
    CountingMetricExporter,
    CountingSpanExporter,
    Sender,
)
from observability._setup_troubles import Troubles

WAIT_S = 30.0


class Spans(SpanExporter):
    """Does with a batch what it is told."""

    def __init__(self, export: Callable[[Sequence[ReadableSpan]], SpanExportResult]) -> None:
        self._export = export

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return self._export(spans)

    def shutdown(self) -> None: ...


def sender(ledger: Ledger, troubles: Troubles) -> Sender:
    return Sender("spans", "nowhere", ledger=ledger, troubles=troubles, session=None)


def traced(exporter: SpanExporter, *, capacity: int, batch: int) -> tuple[TracerProvider, Ledger]:
    ledger, troubles = Ledger(capacity), Troubles()
    batches = BatchSpanProcessor(
        CountingSpanExporter(exporter, sender(ledger, troubles)),
        max_queue_size=capacity,
        max_export_batch_size=batch,
        schedule_delay_millis=3_600_000,
    )
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(AdmittingSpanProcessor(batches, ledger, troubles))
    return provider, ledger


def make(provider: TracerProvider, spans: int) -> None:
    for _ in range(spans):
        provider.get_tracer("test").start_span("work").end()


def test_an_exporter_that_raises_costs_its_batches_and_one_warning() -> None:
    def export(spans: Sequence[ReadableSpan]) -> SpanExportResult:
        raise KeyError("broken")

    provider, ledger = traced(Spans(export), capacity=100, batch=10)
    with capture_logs() as logs:
        make(provider, 95)
        provider.force_flush()
        provider.shutdown()
    assert ledger.counts()["export_failed"] == ledger.counts()["made"] == 95
    assert [log["trouble"] for log in logs] == ["export raised KeyError"]


def test_an_exporter_that_fails_without_a_reason_costs_one_warning() -> None:
    provider, ledger = traced(Spans(lambda spans: SpanExportResult.FAILURE), capacity=100, batch=10)
    with capture_logs() as logs:
        make(provider, 30)
        provider.shutdown()
    assert ledger.counts()["export_failed"] == 30
    assert [log["trouble"] for log in logs] == ["export failed"]


def test_log_and_metric_exporters_that_raise_are_counted_likewise() -> None:
    class Logs(LogRecordExporter):
        def export(self, batch: Any) -> Any:
            raise OSError("broken")

        def shutdown(self) -> None: ...

        def force_flush(self, timeout_millis: int = 0) -> bool:
            return True

    class Metrics(MetricExporter):
        def export(self, metrics_data: Any, timeout_millis: float = 0, **kwargs: Any) -> Any:
            raise OSError("broken")

        def shutdown(self, timeout_millis: float = 0, **kwargs: Any) -> None: ...

        def force_flush(self, timeout_millis: float = 0) -> bool:
            return True

    troubles, logs_ledger, metrics_ledger = Troubles(), Ledger(100), Ledger(1)
    loggers = LoggerProvider(shutdown_on_exit=False)
    loggers.add_log_record_processor(
        AdmittingLogProcessor(
            BatchLogRecordProcessor(CountingLogExporter(Logs(), sender(logs_ledger, troubles))),
            logs_ledger,
            troubles,
        )
    )
    reader = PeriodicExportingMetricReader(
        CountingMetricExporter(Metrics(), sender(metrics_ledger, troubles), metrics_ledger)
    )
    meters = MeterProvider([reader], shutdown_on_exit=False)
    with capture_logs() as logs:
        for _ in range(5):
            loggers.get_logger("test").emit(event_name="dataplane.put", body=[])
        loggers.shutdown()
        meters.get_meter("test").create_counter("c").add(1)
        reader.force_flush()
        meters.shutdown()
    assert logs_ledger.counts()["export_failed"] == 5
    assert metrics_ledger.counts()["export_failed"] == 2
    assert len(logs) == 1


def test_the_queue_is_bounded_and_what_overflows_is_counted_exactly() -> None:
    begun, go_on = threading.Event(), threading.Event()
    exported: list[int] = []

    def export(spans: Sequence[ReadableSpan]) -> SpanExportResult:
        begun.set()
        assert go_on.wait(WAIT_S)
        exported.append(len(spans))
        return SpanExportResult.SUCCESS

    provider, ledger = traced(Spans(export), capacity=20, batch=8)
    make(provider, 8)
    assert begun.wait(WAIT_S)  # 8 are on their way
    make(provider, 1000)
    assert ledger.counts()["pending"] == 20
    assert ledger.counts()["queue_full"] == 988
    go_on.set()
    provider.shutdown()
    counts = ledger.counts()
    assert (counts["made"], counts["exported"], counts["dropped"]) == (1008, 20, 988)
    assert sum(exported) == 20


def test_what_is_on_its_way_when_the_account_closes_is_given_up_once() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def export(spans: Sequence[ReadableSpan]) -> SpanExportResult:
        begun.set()
        assert go_on.wait(WAIT_S)
        return SpanExportResult.SUCCESS

    provider, ledger = traced(Spans(export), capacity=20, batch=8)
    make(provider, 10)
    assert begun.wait(WAIT_S)
    ledger.close()
    go_on.set()
    provider.shutdown()
    counts = ledger.counts()
    assert (counts["made"], counts["exported"], counts["shutdown"]) == (10, 0, 10)


def test_the_first_failure_after_finish_ends_all_trying() -> None:
    tried: list[int] = []

    def export(spans: Sequence[ReadableSpan]) -> SpanExportResult:
        tried.append(len(spans))
        return SpanExportResult.FAILURE

    ledger, troubles = Ledger(100), Troubles()
    sends = sender(ledger, troubles)
    exporter = CountingSpanExporter(Spans(export), sends)
    batches = BatchSpanProcessor(exporter, max_queue_size=100, max_export_batch_size=100)
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(AdmittingSpanProcessor(batches, ledger, troubles))
    make(provider, 3)
    provider.force_flush()
    sends.finish(0.0)
    make(provider, 3)
    provider.force_flush()
    make(provider, 3)
    provider.force_flush()
    provider.shutdown()
    assert tried == [3, 3]
    assert ledger.counts()["export_failed"] == 9


def test_what_the_sdk_logs_in_other_threads_is_not_taken_for_the_reason() -> None:
    import logging

    troubles = Troubles()
    record = logging.LogRecord("opentelemetry.x", logging.ERROR, "", 0, "of %s", ("y",), None)
    with capture_logs() as logs, troubles.listening():
        other = threading.Thread(target=troubles.hear, args=(record,))
        other.start()
        other.join()
        assert troubles.heard() == ""
        troubles.hear(record)
        assert troubles.heard() == "of y"
    assert [log["message"] for log in logs] == ["of y"]


def test_kinds_of_trouble_are_bounded() -> None:
    troubles = Troubles()
    with capture_logs() as logs:
        for number in range(1000):
            troubles.tell(f"trouble {number}")
    assert len(logs) == 64


def test_a_log_processor_that_raises_does_not_reach_the_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from observability import _setup_troubles

    class Broken:
        def warning(self, event: str, **facts: object) -> None:
            raise OSError("stdout is gone")

    monkeypatch.setattr(_setup_troubles, "logger", Broken())
    Troubles().tell("anything")


def test_exported_log_records_are_those_emitted() -> None:
    kept, ledger, troubles = InMemoryLogRecordExporter(), Ledger(10), Troubles()
    provider = LoggerProvider(shutdown_on_exit=False)
    batches = BatchLogRecordProcessor(CountingLogExporter(kept, sender(ledger, troubles)))
    provider.add_log_record_processor(AdmittingLogProcessor(batches, ledger, troubles))
    provider.get_logger("test").emit(event_name="dataplane.put", body=["a"])
    provider.force_flush()
    [finished] = kept.get_finished_logs()
    assert finished.log_record.event_name == "dataplane.put"
    assert ledger.counts()["exported"] == 1
    provider.shutdown()


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("admit"), st.integers(1, 5), st.just(0)),
        st.tuples(st.just("send"), st.integers(1, 5), st.integers(0, 5)),
        st.tuples(st.just("close"), st.just(0), st.just(0)),
    )
)


@given(capacity=st.integers(1, 8), steps=STEPS)
def test_made_is_exported_dropped_and_pending_at_every_moment(
    capacity: int, steps: list[tuple[str, int, int]]
) -> None:
    ledger = Ledger(capacity)
    queued = 0
    for step, items, exported in steps:
        if step == "admit":
            queued += sum(ledger.admit() for _ in range(items))
        elif step == "send" and 0 < items <= queued:
            if ledger.take(items):
                ledger.settle(items, min(exported, items))
            queued -= items
        elif step == "close":
            ledger.close()
            queued = 0
        counts = ledger.counts()
        assert counts["made"] == counts["exported"] + counts["dropped"] + counts["pending"]
        assert counts["pending"] <= capacity
    ledger.close()
    assert ledger.counts()["pending"] == 0
