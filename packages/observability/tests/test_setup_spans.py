"""A lean span says what the SDK's would have said."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from opentelemetry import context, trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBasedTraceIdRatio, Sampler
from opentelemetry.trace import (
    Link,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
)
from span_parents import PARENT, below

from observability._setup_baggage import BaggageProcessor
from observability._setup_span_export import LeanSpanExporter
from observability._setup_spans import LeanSpan, LeanTracerProvider

OTHER = SpanContext(9, 10, is_remote=True, trace_flags=TraceFlags(1))


class Both:
    """The same provider with and without lean spans in front."""

    def __init__(self, sampler: Sampler | None = None) -> None:
        self.exporter = InMemorySpanExporter()
        sdk = TracerProvider(sampler=sampler, resource=Resource({"service.name": "svc"}))
        processor = SimpleSpanProcessor(LeanSpanExporter(self.exporter))
        sdk.add_span_processor(BaggageProcessor())
        sdk.add_span_processor(processor)
        self.sdk = sdk.get_tracer("test", "1", attributes={"x": 1})
        self.lean = LeanTracerProvider(sdk, processor).get_tracer("test", "1", attributes={"x": 1})

    def ended(self) -> list[ReadableSpan]:
        return list(self.exporter.get_finished_spans())


def said(span: ReadableSpan) -> dict[str, Any]:
    assert span.context is not None
    return {
        "trace": (span.context.trace_id, span.context.trace_flags, span.context.trace_state),
        "remote": span.context.is_remote,
        "parent": span.parent,
        "name": span.name,
        "kind": span.kind,
        "attributes": dict(span.attributes or {}),
        "events": [(each.name, dict(each.attributes or {})) for each in span.events],
        "links": [(each.context, dict(each.attributes or {})) for each in span.links],
        "status": (span.status.status_code, span.status.description),
        "dropped": (span.dropped_attributes, span.dropped_events, span.dropped_links),
        "scope": span.instrumentation_scope,
        "resource": span.resource,
    }


def _attributes(span: trace.Span) -> None:
    names = ["a", "b"]
    span.set_attribute("names", names)
    names.append("c")
    span.set_attributes({"number": 1, "text": "x", "nested": {"k": [1, 2]}, "none": None})
    span.set_attribute("object", object)
    span.set_attribute("rl.step", 99)


def _many(span: trace.Span) -> None:
    for number in range(SpanLimits().max_span_attributes + 5):
        span.set_attribute(f"a{number}", number)
    for number in range(130):
        span.add_link(OTHER, {"n": number})
        span.add_event("e", {"n": number})


def _links(span: trace.Span) -> None:
    span.add_link(OTHER)
    span.add_link(OTHER, {"n": [1]})
    span.add_link(trace.INVALID_SPAN_CONTEXT)


def _statuses(span: trace.Span) -> None:
    span.set_status(Status(StatusCode.ERROR, "why"))
    span.set_status(StatusCode.UNSET)
    span.update_name("other")


def _ok_stays(span: trace.Span) -> None:
    span.set_status(StatusCode.OK)
    span.set_status(StatusCode.ERROR, "late")


def _exception(span: trace.Span) -> None:
    span.record_exception(ValueError("x"), {"more": 1})


def _after_its_end(span: trace.Span) -> None:
    span.end()
    _attributes(span)
    _links(span)
    _statuses(span)
    span.add_event("late")
    span.end()


@pytest.mark.parametrize(
    "change", [_attributes, _many, _links, _statuses, _ok_stays, _exception, _after_its_end]
)
def test_it_says_what_the_sdks_says(change: Callable[[trace.Span], None]) -> None:
    both = Both()
    for tracer in (both.sdk, both.lean):
        span = tracer.start_span(
            "work",
            below(),
            SpanKind.CLIENT,
            {"own": "x", "rl.step": 4},
            [Link(OTHER, {"at": "start"})],
        )
        change(span)
        span.end()
    assert isinstance(span, LeanSpan)
    sdk, lean = both.ended()
    assert said(lean) == said(sdk)
    assert lean.start_time is not None
    assert lean.end_time is not None
    assert sdk.end_time is not None
    assert sdk.end_time <= lean.start_time <= lean.end_time


def test_times_may_be_given() -> None:
    both = Both()
    both.lean.start_span("work", below(), start_time=1).end(2)
    [span] = both.ended()
    assert (span.start_time, span.end_time) == (1, 2)


@pytest.mark.parametrize("method", ["start_span", "start_as_current_span"])
def test_an_error_that_leaves_its_block_is_recorded_as_by_the_sdk(method: str) -> None:
    both = Both()
    for tracer in (both.sdk, both.lean):
        with (
            pytest.raises(ValueError, match="x"),
            getattr(tracer, method)("work", below()),
        ):
            raise ValueError("x")
    sdk, lean = (said(span) for span in both.ended())
    for each in (sdk, lean):
        each["events"][0][1].pop("exception.stacktrace")
    assert lean == sdk


def test_it_is_the_parent_of_what_begins_in_it() -> None:
    both = Both()
    with both.lean.start_as_current_span("outer", below()) as outer:
        with both.lean.start_as_current_span("inner"):
            pass
        inner = both.ended()[0]
    assert inner.parent == outer.get_span_context()
    assert inner.context is not None
    assert inner.context.trace_id == PARENT.trace_id


def test_a_root_and_what_is_not_sampled_are_left_to_the_sdk() -> None:
    both = Both(ParentBasedTraceIdRatio(0.0))
    assert not both.lean.start_span("root", context.Context()).is_recording()
    unsampled = SpanContext(7, 8, is_remote=True, trace_flags=TraceFlags(0))
    assert not both.lean.start_span("child", below(unsampled)).is_recording()
    assert isinstance(both.lean.start_span("child", below()), LeanSpan)


def test_a_sampler_that_does_not_follow_the_parent_decides_itself() -> None:
    assert not isinstance(Both(ALWAYS_ON).lean.start_span("child", below()), LeanSpan)


def test_of_many_threads_one_ends_it() -> None:
    both = Both()
    span = both.lean.start_span("work", below())
    threads = [threading.Thread(target=span.end) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(both.ended()) == 1
