"""What is encoded here is what the SDK's exporters would have sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import _logs, context, trace
from opentelemetry._logs import SeverityNumber
from opentelemetry.exporter.otlp.proto.common._log_encoder import encode_logs
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk._logs import LoggerProvider, ReadableLogRecord
from opentelemetry.sdk._logs.export import (
    BatchLogRecordProcessor,
    LogRecordExporter,
    LogRecordExportResult,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import (
    Link,
    SpanContext,
    SpanKind,
    StatusCode,
    TraceFlags,
)
from span_parents import PARENT, below

from observability import _setup_encoding, _setup_events, _setup_span_export
from observability._setup_baggage import BaggageProcessor
from observability._setup_encoding import encodable, sender_of
from observability._setup_events import LeanLogExporter, LeanLoggerProvider
from observability._setup_span_export import LeanSpanExporter
from observability._setup_spans import LeanSpan, LeanTracerProvider

LOCAL = SpanContext(2**127, 2**63, is_remote=False, trace_flags=TraceFlags(1))
RESOURCE = Resource({"service.name": "svc", "process.pid": 7, "ratio": 0.5}, "schema-of-resource")
SCOPE = ("test", "1", "schema-of-scope", {"x": 1})

plain = st.one_of(
    st.text(), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False)
)
lists = st.one_of(
    st.lists(st.text(), max_size=4),
    st.lists(st.integers(-9, 9), max_size=4).map(tuple),
    st.lists(st.booleans(), max_size=4),
    st.lists(st.floats(allow_nan=False), max_size=4),
)
# What OTLP cannot carry, what the SDK cleans away, and what looks like something else.
odd = st.one_of(
    st.just(2**70),
    st.just("\ud800"),
    st.none(),
    st.binary(max_size=4),
    st.just([1, "x"]),
    st.just([1, True]),
    st.just([None, "x"]),
    st.just({"nested": [1]}),
    st.just("x" * 1000),
)
attributes = st.dictionaries(st.text(max_size=8), st.one_of(plain, lists, odd), max_size=6)


@dataclass
class Answer:
    success: bool


class Capture(SpanExporter, LogRecordExporter):
    """Takes spans, events and encoded requests, as the SDK's exporters do."""

    def __init__(self, *, success: bool = True) -> None:
        self.requests: list[bytes] = []
        self.success = success
        self._client = self

    def export(self, batch: Any) -> Any:
        if isinstance(batch, bytes):
            self.requests.append(batch)
            return Answer(self.success)
        if batch and isinstance(batch[0], ReadableSpan):
            self.requests.append(encode_spans(batch).SerializeToString())
            return SpanExportResult.SUCCESS
        self.requests.append(encode_logs(batch).SerializeToString())
        return LogRecordExportResult.SUCCESS

    def shutdown(self) -> None: ...

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return True


class Collect(SimpleSpanProcessor):
    """Keeps the spans that end."""

    def __init__(self, exporter: SpanExporter) -> None:
        super().__init__(exporter)
        self.ended: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self.ended.append(span)


def spans_sent(change: Callable[[trace.Span], None], parent: SpanContext = PARENT) -> list[Any]:
    """The SDK's and the lean one: each a request of one span, its id and times taken out."""
    found = []
    for lean in (False, True):
        exporter = Capture()
        sdk = TracerProvider(resource=RESOURCE)
        processor = SimpleSpanProcessor(LeanSpanExporter(exporter))
        sdk.add_span_processor(BaggageProcessor())
        sdk.add_span_processor(processor)
        provider = LeanTracerProvider(sdk, processor) if lean else sdk
        span = provider.get_tracer(*SCOPE).start_span(
            "work", below(parent), SpanKind.CONSUMER, links=[Link(LOCAL), Link(PARENT)]
        )
        assert isinstance(span, LeanSpan) is lean
        change(span)
        span.end()
        request = ExportTraceServiceRequest.FromString(exporter.requests[0])
        [resource_spans] = request.resource_spans
        [scope_spans] = resource_spans.scope_spans
        [message] = scope_spans.spans
        assert len(message.span_id) == 8
        assert 0 < message.start_time_unix_nano <= message.end_time_unix_nano
        for field in ("span_id", "start_time_unix_nano", "end_time_unix_nano"):
            message.ClearField(field)
        for event in message.events:
            event.ClearField("time_unix_nano")
        message.status.SetInParent()  # the SDK tells also that there is none
        message.attributes.sort(key=lambda pair: pair.key)  # a set
        found.append(request)
    return found


@given(attributes)
def test_a_span_is_encoded_as_by_the_sdk(own: dict[str, Any]) -> None:
    sdk, lean = spans_sent(lambda span: span.set_attributes(own))
    for request in (sdk, lean):  # a lean span does not count what can be no attribute
        request.resource_spans[0].scope_spans[0].spans[0].ClearField("dropped_attributes_count")
    assert lean == sdk


@pytest.mark.parametrize(
    "change",
    [
        lambda span: span.set_status(StatusCode.ERROR, "why"),
        lambda span: span.set_status(StatusCode.OK),
        lambda span: span.add_event("e", {"n": 1}),
        lambda span: span.add_link(LOCAL, {"n": 1}),
        lambda span: [span.add_link(LOCAL) for _ in range(200)],
        lambda span: span.set_attributes({f"a{n}": n for n in range(200)}),
        lambda span: span.update_name("other"),
    ],
)
@pytest.mark.parametrize("parent", [PARENT, LOCAL])
def test_so_are_states_events_links_and_what_is_too_much(
    change: Callable[[trace.Span], None], parent: SpanContext
) -> None:
    sdk, lean = spans_sent(change, parent)
    assert lean == sdk


def test_a_limit_to_the_length_of_texts_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT", "3")
    monkeypatch.setenv("OTEL_LOGRECORD_ATTRIBUTE_VALUE_LENGTH_LIMIT", "3")
    sdk, lean = spans_sent(lambda span: span.set_attribute("text", "longer"))
    assert lean == sdk
    assert b"lon" in lean.SerializeToString()
    assert b"longer" not in lean.SerializeToString()
    sdk, lean = events_sent(attributes={"text": "longer"})
    assert lean == sdk
    assert b"longer" not in lean.SerializeToString()


def test_equal_values_of_different_types_are_not_taken_for_each_other() -> None:
    for value in (1, True, 1.0, 0.0, -0.0, (1, 1), (True, True), (1.0, 1.0), (0.0,), (-0.0,)):
        sdk, lean = spans_sent(lambda span, value=value: span.set_attribute("k", value))
        assert lean == sdk


def test_spans_of_both_kinds_travel_in_one_request() -> None:
    exporter = Capture()
    sdk = TracerProvider(resource=RESOURCE)
    processor = Collect(exporter)
    sdk.add_span_processor(processor)
    lean = LeanTracerProvider(sdk, processor)
    for tracer in (lean.get_tracer("a"), lean.get_tracer("b")):
        with tracer.start_as_current_span("root", context.Context()):
            tracer.start_span("child").end()
            tracer.start_span("told", attributes={"k": b"odd"}).end()
    assert LeanSpanExporter(exporter).export(processor.ended) is SpanExportResult.SUCCESS
    [data] = exporter.requests
    names = [
        (scope_spans.scope.name, span.name)
        for resource_spans in ExportTraceServiceRequest.FromString(data).resource_spans
        for scope_spans in resource_spans.scope_spans
        for span in scope_spans.spans
    ]
    assert sorted(names) == sorted(
        (scope, name) for scope in "ab" for name in ("root", "child", "told")
    )


def events_sent(parent: SpanContext | None = PARENT, **facts: Any) -> list[Any]:
    """What the SDK's logger and the lean one send."""
    found = []
    for lean in (False, True):
        exporter = Capture()
        sdk = LoggerProvider(resource=RESOURCE, shutdown_on_exit=False)
        processor = BatchLogRecordProcessor(LeanLogExporter(exporter))
        sdk.add_log_record_processor(processor)
        provider: _logs.LoggerProvider = sdk
        if lean:
            provider = LeanLoggerProvider(sdk, processor, RESOURCE)
        told: dict[str, Any] = {
            "event_name": "dataplane.put",
            "timestamp": 5,
            "observed_timestamp": 6,
            "severity_number": SeverityNumber.WARN,
            "context": context.Context() if parent is None else below(parent),
            "body": '["a"]',
            "attributes": {},
        }
        provider.get_logger(*SCOPE).emit(**{**told, **facts})
        assert processor.force_flush()
        processor.shutdown()
        request = ExportLogsServiceRequest.FromString(exporter.requests[0])
        [resource_logs] = request.resource_logs
        [scope_logs] = resource_logs.scope_logs
        [record] = scope_logs.log_records
        record.attributes.sort(key=lambda pair: pair.key)
        found.append(request)
    return found


# Nothing of the SDK's own is dropped or cleaned from a log record of plain values.
@given(st.dictionaries(st.text(min_size=1, max_size=8), st.one_of(plain, lists), max_size=6))
def test_an_event_is_encoded_as_by_the_sdk(own: dict[str, Any]) -> None:
    sdk, lean = events_sent(attributes=own)
    assert lean == sdk


@pytest.mark.filterwarnings("ignore:Log record attributes were dropped")
@pytest.mark.parametrize(
    "facts",
    [
        {"attributes": {"odd": {"nested": [1, None]}, "bytes": b"x", "mixed": [1, "x"]}},
        {"attributes": {f"a{n}": n for n in range(200)}},
        {"attributes": {"big": 2**70, "kept": 1}},
        {"attributes": None},
        {"body": {"nested": 1}},
        {"severity_text": "by another keyword"},
        {"severity_number": None},
        {"parent": None},
        {"parent": LOCAL},
    ],
)
def test_so_is_what_only_the_sdk_can_encode(facts: dict[str, Any]) -> None:
    sdk, lean = events_sent(**facts)
    assert lean == sdk


def test_a_record_made_by_hand_is_the_sdks() -> None:
    exporter = Capture()
    sdk = LoggerProvider(resource=RESOURCE, shutdown_on_exit=False)
    processor = BatchLogRecordProcessor(LeanLogExporter(exporter))
    sdk.add_log_record_processor(processor)
    logger = LeanLoggerProvider(sdk, processor, RESOURCE).get_logger("by hand")
    logger.emit(_logs.LogRecord(timestamp=5, body="x", event_name="own"))
    logger.emit(event_name="bare")
    assert processor.force_flush()
    processor.shutdown()
    request = ExportLogsServiceRequest.FromString(exporter.requests[0])
    records = [
        record.event_name
        for resource_logs in request.resource_logs
        for scope_logs in resource_logs.scope_logs
        for record in scope_logs.log_records
    ]
    assert records == ["own", "bare"]


def test_plain_spans_and_events_are_not_encoded_by_the_sdk(monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[Any] = []

    def refuse(batch: Any) -> None:
        refused.extend(batch)
        raise AssertionError

    exporter = Capture()
    sdk = TracerProvider(resource=RESOURCE)
    processor = SimpleSpanProcessor(LeanSpanExporter(exporter))
    sdk.add_span_processor(processor)
    tracer = LeanTracerProvider(sdk, processor).get_tracer(*SCOPE)
    logs = LoggerProvider(resource=RESOURCE, shutdown_on_exit=False)
    queued = BatchLogRecordProcessor(LeanLogExporter(exporter))
    logs.add_log_record_processor(queued)
    logger = LeanLoggerProvider(logs, queued, RESOURCE).get_logger(*SCOPE)
    monkeypatch.setattr(_setup_span_export, "encode_spans", refuse)
    monkeypatch.setattr(_setup_events, "encode_logs", refuse)
    span = tracer.start_span("work", below(PARENT), attributes={"a": 1, "b": ["x"], "c": 0.5})
    span.add_link(LOCAL)
    span.end()
    logger.emit(
        event_name="dataplane.put",
        timestamp=5,
        observed_timestamp=6,
        severity_number=SeverityNumber.INFO,
        body="[]",
        attributes={"a": 1, "b": ["x"]},
    )
    assert queued.force_flush()
    queued.shutdown()
    assert len(exporter.requests) == 2
    assert refused == []


@pytest.mark.parametrize(
    "odd", [None, b"x", 2**70, "\udcff", {"k": 1}, [1, None], SeverityNumber.INFO, object()]
)
def test_odd_attributes_of_the_process_or_a_scope_fail_nothing(odd: Any) -> None:
    for resource, own in ((Resource({"odd": odd, "x": 1}), None), (RESOURCE, {"odd": odd})):
        exporter = Capture()
        sdk = TracerProvider(resource=resource)
        processor = SimpleSpanProcessor(LeanSpanExporter(exporter))
        sdk.add_span_processor(processor)
        tracer = LeanTracerProvider(sdk, processor).get_tracer("t", attributes=own)
        tracer.start_span("s", below(PARENT)).end()
        logs = LoggerProvider(resource=resource, shutdown_on_exit=False)
        queued = BatchLogRecordProcessor(LeanLogExporter(exporter))
        logs.add_log_record_processor(queued)
        logger = LeanLoggerProvider(logs, queued, resource).get_logger("t", attributes=own)
        logger.emit(event_name="e")
        assert queued.force_flush()
        queued.shutdown()
        assert len(exporter.requests) == 2


def test_a_tracer_asked_for_again_is_the_same_one_and_its_resource_travels_once() -> None:
    exporter = Capture()
    sdk = TracerProvider(resource=RESOURCE)
    processor = Collect(exporter)
    lean = LeanTracerProvider(sdk, processor)
    for _ in range(5):
        lean.get_tracer("library", "1").start_span("call", below(PARENT)).end()
    LeanSpanExporter(exporter).export(processor.ended)
    assert len(ExportTraceServiceRequest.FromString(exporter.requests[0]).resource_spans) == 1
    logs = LeanLoggerProvider(
        LoggerProvider(resource=RESOURCE, shutdown_on_exit=False),
        BatchLogRecordProcessor(LeanLogExporter(exporter)),
        RESOURCE,
    )
    assert logs.get_logger("library") is logs.get_logger("library")


odd_texts = st.text(st.characters(exclude_categories=()), max_size=4)


def names_sent(exporter: Capture) -> list[tuple[str, str]]:
    """Name and status text of the spans of the only request."""
    [data] = exporter.requests
    return [
        (span.name, span.status.message)
        for resource_spans in ExportTraceServiceRequest.FromString(data).resource_spans
        for scope_spans in resource_spans.scope_spans
        for span in scope_spans.spans
    ]


@given(odd_texts)
def test_only_halves_of_surrogate_pairs_are_replaced(text: str) -> None:
    found = encodable(text)
    found.encode()
    assert encodable(found) == found
    if not any("\ud800" <= character <= "\udfff" for character in text):
        assert found == text


@given(st.lists(st.tuples(st.booleans(), odd_texts, odd_texts), max_size=5))
def test_whatever_their_names_and_states_all_spans_of_a_batch_arrive(
    told: list[tuple[bool, str, str]],
) -> None:
    exporter, left_out = Capture(), []
    sdk = TracerProvider(resource=RESOURCE)
    processor = Collect(exporter)
    sdk.add_span_processor(processor)
    lean = LeanTracerProvider(sdk, processor)
    for is_lean, name, text in told:
        span = (lean if is_lean else sdk).get_tracer("t").start_span(name, below(PARENT))
        span.set_status(StatusCode.ERROR, text)
        span.end()
    LeanSpanExporter(exporter, left_out.append).export(processor.ended)
    expected = [(encodable(name), encodable(text)) for _, name, text in told]
    assert sorted(names_sent(exporter)) == sorted(expected)
    assert left_out == []


def test_a_span_that_nobody_can_encode_costs_itself_and_is_told() -> None:
    exporter, left_out = Capture(), []
    sdk = TracerProvider(resource=RESOURCE)
    processor = Collect(exporter)
    sdk.add_span_processor(processor)
    lean = LeanTracerProvider(sdk, processor)
    for tracer in (sdk.get_tracer("a"), lean.get_tracer("a"), lean.get_tracer("half \ud800")):
        tracer.start_span("kept", below(PARENT)).end()
        odd: Any = 7
        tracer.start_span(odd, below(PARENT)).end()
        span = tracer.start_span("with an odd event", below(PARENT))
        span.add_event("\ud800")
        span.end()
    exporting = LeanSpanExporter(exporter, left_out.append)
    assert exporting.export(processor.ended) is SpanExportResult.SUCCESS
    # Of the last tracer the name itself, so all.
    assert [name for name, _ in names_sent(exporter)] == ["kept"] * 2
    assert left_out == [2 + 2 + 3]


def test_a_batch_of_nothing_but_such_spans_is_not_sent() -> None:
    exporter, left_out = Capture(), []
    sdk = TracerProvider()
    processor = Collect(exporter)
    sdk.add_span_processor(processor)
    odd: Any = 7
    sdk.get_tracer("a").start_span(odd).end()
    exporting = LeanSpanExporter(exporter, left_out.append)
    assert exporting.export(processor.ended) is SpanExportResult.SUCCESS
    assert (exporter.requests, left_out) == ([], [1])


@pytest.mark.parametrize("lean", [False, True])
def test_an_event_that_nobody_can_encode_costs_itself_and_is_told(lean: bool) -> None:
    exporter, left_out = Capture(), []
    sdk = LoggerProvider(resource=RESOURCE, shutdown_on_exit=False)
    processor = BatchLogRecordProcessor(LeanLogExporter(exporter, left_out.append))
    sdk.add_log_record_processor(processor)
    provider = LeanLoggerProvider(sdk, processor, RESOURCE) if lean else sdk
    logger = provider.get_logger("t")
    half: Any = "half \ud800"
    for name, body in (("a", "x"), ("b", half), (half, "x"), ("c", object()), ("d", ["x"])):
        logger.emit(
            event_name=name,
            timestamp=5,
            observed_timestamp=6,
            severity_number=SeverityNumber.INFO,
            body=body,
            attributes={"odd": half, "kept": 1},
        )
    assert processor.force_flush()
    processor.shutdown()
    found = [
        (record.event_name, [pair.key for pair in record.attributes])
        for resource_logs in ExportLogsServiceRequest.FromString(exporter.requests[0]).resource_logs
        for scope_logs in resource_logs.scope_logs
        for record in scope_logs.log_records
    ]
    replaced = ["b", "half \N{REPLACEMENT CHARACTER}"] if lean else []
    assert sorted(found) == [(name, ["kept"]) for name in sorted(["a", "d", *replaced])]
    assert left_out == [1 if lean else 3]


def test_long_arrays_are_not_kept() -> None:
    before = _setup_encoding._kept_array.cache_info().currsize
    for number in range(20):
        ids = [f"{number}-{index}" for index in range(1000)]
        sdk, lean = spans_sent(lambda span, ids=ids: span.set_attribute("ids", ids))
        assert lean == sdk
    assert _setup_encoding._kept_array.cache_info().currsize == before


def test_what_a_collector_refuses_is_a_failure() -> None:
    refusing = Capture(success=False)
    spans: Sequence[ReadableSpan] = []
    assert LeanSpanExporter(refusing).export(spans) is SpanExportResult.FAILURE
    records: Sequence[ReadableLogRecord] = []
    assert LeanLogExporter(refusing).export(records) is LogRecordExportResult.FAILURE


def test_the_installed_sdks_exporters_take_encoded_requests() -> None:
    assert sender_of(OTLPSpanExporter()) is not None
    assert sender_of(OTLPLogExporter()) is not None
    assert LeanLogExporter(OTLPLogExporter()).takes_encoded
