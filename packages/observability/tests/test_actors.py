"""Trace context across actors, in one process; `integration/test_traced_actors.py` uses Ray."""

from __future__ import annotations

import asyncio
import inspect
import pickle
from contextvars import copy_context

import pytest
from opentelemetry import baggage, context, trace

from dataplane_core import telemetry
from observability import TracedHandle, attached, extract, inject, span, step_context, traced

pytestmark = pytest.mark.usefixtures("sdk")


class Worker:
    """Class of an actor."""

    @traced
    def plain(self, a, b=2, *args, c, **kwargs):
        """Add."""
        return a + b + c, current_trace_id()

    @traced(name="other", bucket="productive")
    def named(self):
        return (
            current_trace_id(),
            trace.get_current_span().name,
            trace.get_current_span().attributes,
        )

    @traced
    async def awaited(self, a):
        await asyncio.sleep(0)
        return a, current_trace_id()

    @traced
    def generated(self, n):
        for number in range(n):
            yield number, current_trace_id()

    @traced
    def talk(self):
        received = ""
        while received is not None:
            try:
                received = yield received
            except ValueError as error:
                received = str(error)
        return "end"

    @traced
    async def talk_async(self):
        received = ""
        while received is not None:
            try:
                received = yield received
            except ValueError as error:
                received = str(error)

    @traced
    async def items(self, n):
        for number in range(n):
            yield number, current_trace_id()


def current_trace_id():
    return trace.format_trace_id(trace.get_current_span().get_span_context().trace_id)


def test_the_signature_gains_only_the_argument_carrier():
    assert str(inspect.signature(Worker.plain)) == (
        "(self, a, b=2, *args, c, carrier=None, **kwargs)"
    )
    assert (Worker.plain.__name__, Worker.plain.__doc__) == ("plain", "Add.")
    assert inspect.iscoroutinefunction(Worker.awaited)
    assert inspect.isasyncgenfunction(Worker.items)
    assert inspect.isgeneratorfunction(Worker.generated)


def test_a_call_with_a_carrier_belongs_to_the_callers_trace():
    worker = Worker()
    with span("caller"):
        carrier, trace_id = inject(), current_trace_id()
    assert worker.plain(1, c=3, carrier=carrier) == (6, trace_id)
    assert asyncio.run(worker.awaited(1, carrier=carrier)) == (1, trace_id)
    assert list(worker.generated(2, carrier=carrier)) == [(0, trace_id), (1, trace_id)]

    async def collect():
        return [item async for item in worker.items(2, carrier=carrier)]

    assert asyncio.run(collect()) == [(0, trace_id), (1, trace_id)]
    assert not trace.get_current_span().get_span_context().is_valid


def test_a_generators_span_is_not_current_in_its_consumer():
    worker = Worker()
    with span("caller") as caller:
        for _number, inside in worker.generated(2, carrier=inject()):
            assert inside == current_trace_id()
            assert trace.get_current_span() is caller

        async def consume():
            async for _number, inside in worker.items(2, carrier=inject()):
                assert inside == current_trace_id()
                assert trace.get_current_span() is caller

        asyncio.run(consume())


def test_an_abandoned_generator_ends_its_span_in_any_context(sdk, caplog):
    worker = Worker()

    async def abandon():
        items = worker.items(2)
        # A task has its own context: start and close are in different ones.
        await asyncio.create_task(anext(items))
        await asyncio.create_task(items.aclose())

    asyncio.run(abandon())
    generated = worker.generated(2)
    copy_context().run(next, generated)
    copy_context().run(generated.close)
    assert [each.name for each in sdk.spans.get_finished_spans()] == ["items", "generated"]
    assert not caplog.records


def test_a_generator_receives_what_its_consumer_sends():
    worker = Worker()
    talk = worker.talk()
    assert [next(talk), talk.send("a"), talk.throw(ValueError("b"))] == ["", "a", "b"]
    with pytest.raises(StopIteration) as stop:
        next(talk)
    assert stop.value.value == "end"

    async def converse():
        talk = worker.talk_async()
        return [await anext(talk), await talk.asend("a"), await talk.athrow(ValueError("b"))]

    assert asyncio.run(converse()) == ["", "a", "b"]


def test_a_call_without_a_carrier_begins_a_trace():
    result, new_trace_id = Worker().plain(1, c=3)
    assert result == 6
    assert int(new_trace_id, 16) != 0


def test_name_and_bucket_are_those_of_the_decorator():
    with span("caller"):
        expected = current_trace_id(), "other", "productive"
        trace_id, name, attributes = Worker().named(carrier=inject())
    assert (trace_id, name, attributes["rl.bucket"]) == expected


def test_a_method_that_has_a_carrier_already_is_refused():
    with pytest.raises(TypeError, match="has an argument 'carrier' already"):

        @traced
        def method(self, carrier):
            pass


def test_run_and_step_travel_with_the_context():
    with step_context("run-1", 7, 6):
        carrier = inject()
    assert telemetry.step_facts() == {}
    with attached(carrier):
        assert telemetry.step_facts() == {
            "rl.run_id": "run-1",
            "rl.step": 7,
            "rl.weight_version": 6,
        }
        assert baggage.get_baggage("rl.step") == "7"
    with step_context("7", 7, 10**20):  # more than the 64 bits of an attribute
        facts = telemetry.step_facts()
        assert (facts["rl.run_id"], facts["rl.weight_version"]) == ("7", "1" + 20 * "0")


@pytest.mark.parametrize(
    "carrier",
    [None, {}, {"traceparent": "x"}, {"traceparent": "00-0-0-0"}, {"baggage": "%%%;;;==,,"}],
)
def test_a_malformed_carrier_is_ignored(carrier):
    context = extract(carrier)
    assert not trace.get_current_span(context).get_span_context().is_valid
    assert Worker().plain(1, c=3, carrier=carrier)[0] == 6


class Handle:
    """Stand-in for a Ray handle, which records the calls of its methods."""

    def __init__(self):
        self.calls = []

    @property
    def step(self):
        return self

    def remote(self, *args, **kwargs):
        self.calls.append((args, kwargs))
        return "reference"


def test_a_traced_handle_sends_the_carrier_of_its_caller():
    handle = Handle()
    with span("caller"):
        assert TracedHandle(handle).step.remote(1, b=2) == "reference"
        expected = inject()
    assert handle.calls == [((1,), {"b": 2, "carrier": expected})]


def test_a_traced_handle_can_be_sent_to_another_process():
    copy = pickle.loads(pickle.dumps(TracedHandle(Handle())))
    assert copy.step.remote() == "reference"


def test_baggage_of_any_type_travels_as_text():
    for value in ("a, b=c", 7, ["x"]):
        token = context.attach(baggage.set_baggage("rl.note", value))
        carrier = inject()
        context.detach(token)
        assert baggage.get_baggage("rl.note", extract(carrier)) == str(value)
    assert "baggage" not in inject()
    with attached(carrier), attached({"baggage": "rl.note=y"}):
        assert baggage.get_baggage("rl.note") == "y"
    assert baggage.get_all(extract({"traceparent": "x"})) == {}
