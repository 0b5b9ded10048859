"""What samples say is not kept unless somebody asked for it."""

import os
import sqlite3
import traceback

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from google.protobuf.json_format import MessageToDict
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.logs.v1.logs_pb2 import LogsData
from opentelemetry.proto.metrics.v1.metrics_pb2 import MetricsData
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

from dataplane_admin.ingest import Limits, router
from dataplane_admin.ingest.sample_text import MAX_TEXT, remove_sample_text
from dataplane_admin.store import Store

SECRET = "what the user said"
TRACE = bytes(range(16))
PROTOBUF = {"content-type": "application/x-protobuf"}
QUOTING = [
    "ai.prompt.messages",  # Vercel AI
    "ai.response.text",
    "ai.response.toolCalls",
    "ai.toolCall.args",
    "all_messages_events",  # pydantic-ai
    "exception.message",
    "final_result",
    "gen_ai.completion.0.content",
    "gen_ai.event.content",
    "gen_ai.input.messages",
    "gen_ai.prompt.0.content",
    "gen_ai.system_instructions",
    "gen_ai.tool.call.arguments",
    "gen_ai.tool.definitions",
    "input.value",
    "langfuse.observation.input",
    "langfuse.trace.metadata.note",
    "llm.output_messages.0.message.content",
    "llm.prompt_template.variables",
    "logfire.msg",
    "mlflow.spanInputs",
    "mlflow.spanOutputs",
    "pydantic_ai.all_messages",
    "retrieval.documents.0.document.content",  # OpenInference
    "tool.parameters",
    "tool_response",
    "traceloop.entity.output",
    "x" * (MAX_TEXT + 1),
]
KEPT = {
    "ai.model.id": "policy",
    "gen_ai.request.model": "policy",
    "gen_ai.response.finish_reasons": ["stop"],
    "gen_ai.usage.input_tokens": 17,
    "global_step": 3,
    "http.request.method": "POST",
    "llm.token_count.prompt": 17,
    "message_count": 2,
    "mlflow.spanType": "LLM",
    "openinference.span.kind": "LLM",
    "process.command_line": "python -m verl.trainer.main_ppo " + "x" * 2 * MAX_TEXT,
    "project": "x" * 100,
    "rl.step": 3,
}
PLACES = ["resource", "scope", "span", "event", "link"]


def set_value(value: AnyValue, told) -> None:
    if isinstance(told, list):
        for one in told:
            set_value(value.array_value.values.add(), one)
    elif isinstance(told, dict):
        for key, one in told.items():
            set_value(value.kvlist_value.values.add(key=key).value, one)
    else:
        kind = {str: "string", bytes: "bytes", bool: "bool", int: "int", float: "double"}
        setattr(value, f"{kind[type(told)]}_value", told)


def spans(attributes, *, place="span"):
    data = TracesData()
    resource_spans = data.resource_spans.add()
    scope_spans = resource_spans.scope_spans.add()
    span = scope_spans.spans.add(
        trace_id=TRACE,
        span_id=os.urandom(8),
        name="chat",
        start_time_unix_nano=1,
        end_time_unix_nano=2,
    )
    records = {
        "resource": lambda: resource_spans.resource,
        "scope": lambda: scope_spans.scope,
        "span": lambda: span,
        "event": lambda: span.events.add(name="message"),
        "link": lambda: span.links.add(trace_id=TRACE, span_id=os.urandom(8)),
    }
    record = records[place]()
    for key, told in attributes.items():
        set_value(record.attributes.add(key=key).value, told)
    return data, record


def post(folder, data, *, as_json=False, **options):
    """Post spans; return the stored one, and all bytes on disk."""
    path = folder / "admin.sqlite"
    with Store.open(f"sqlite:///{path}") as store:
        app = FastAPI()
        app.include_router(router(store, Limits(), **options))
        client = TestClient(app)
        if as_json:
            body = MessageToDict(data)
            span = body["resourceSpans"][0]["scopeSpans"][0]["spans"][0]
            span["traceId"], span["spanId"] = TRACE.hex(), os.urandom(8).hex()
            for link in span.get("links", ()):
                link["traceId"], link["spanId"] = TRACE.hex(), os.urandom(8).hex()
            answer = client.post("/v1/traces", json=body)
        else:
            answer = client.post("/v1/traces", content=data.SerializeToString(), headers=PROTOBUF)
        assert answer.status_code == 200
        [span] = store.trace_records(TRACE.hex()).spans
    return span, b"".join(one.read_bytes() for one in folder.glob("admin.sqlite*"))


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_quotations_are_not_written_and_the_rest_is(tmp_path, place, as_json):
    told = dict.fromkeys(QUOTING, SECRET) | {"nested": {"any": [SECRET, "x" * MAX_TEXT]}} | KEPT
    data, _ = spans(told, place=place)
    _, written = post(tmp_path, data, as_json=as_json)
    assert SECRET.encode() not in written
    for key in KEPT:
        assert key.encode() in written


@pytest.mark.parametrize("key", QUOTING)
@pytest.mark.parametrize("told", [SECRET, SECRET.encode(), [SECRET], {"0": SECRET}])
def test_a_key_that_speaks_of_content_keeps_no_text(key, told):
    data, span = spans({key: told, "rl.step": 3})
    assert remove_sample_text(data)
    assert [pair.key for pair in span.attributes] == ["rl.step"]
    assert span.dropped_attributes_count == 1


def test_facts_about_model_process_and_operation_are_kept():
    data, span = spans(KEPT)
    before = data.SerializeToString()
    assert not remove_sample_text(data)
    assert data.SerializeToString() == before
    assert len(span.attributes) == len(KEPT)


def test_text_is_kept_to_a_length_under_a_key_that_says_nothing():
    data, span = spans({"a": "x" * MAX_TEXT, "b": "x" * (MAX_TEXT + 1), "c": [SECRET] * 8})
    assert remove_sample_text(data)
    assert [pair.key for pair in span.attributes] == ["a"]


def test_log_records_and_data_points_keep_no_quotation():
    logs, metrics = LogsData(), MetricsData()
    resource_logs, resource_metrics = logs.resource_logs.add(), metrics.resource_metrics.add()
    scope_logs, scope_metrics = resource_logs.scope_logs.add(), resource_metrics.scope_metrics.add()
    records = [
        resource_logs.resource,
        scope_logs.scope,
        scope_logs.log_records.add(),
        resource_metrics.resource,
        scope_metrics.scope,
        *(
            getattr(scope_metrics.metrics.add(), kind).data_points.add()
            for kind in ("gauge", "sum", "histogram", "exponential_histogram", "summary")
        ),
    ]
    for record in records:
        record.attributes.add(key="prompt").value.string_value = SECRET
        record.attributes.add(key="rl.step").value.int_value = 3
    assert remove_sample_text(logs)
    assert remove_sample_text(metrics)
    assert all([pair.key for pair in record.attributes] == ["rl.step"] for record in records)


def test_of_an_exception_the_types_and_the_frames_are_kept():
    def ask(prompt):
        try:
            raise KeyError(prompt)
        except KeyError as error:
            raise ValueError(f"cannot answer:\n{prompt}\nValueError: {prompt}") from error

    with pytest.raises(ValueError, match="cannot answer") as caught:
        ask(SECRET)
    text = "".join(traceback.format_exception(caught.value))
    data, event = spans({"exception.stacktrace": text}, place="event")
    span = data.resource_spans[0].scope_spans[0].spans[0]
    span.status.message = f"ValueError: {SECRET}"
    assert remove_sample_text(data)
    kept = event.attributes[0].value.string_value.splitlines()
    assert SECRET not in "\n".join(kept)
    assert kept.count("Traceback (most recent call last):") == 2
    assert "KeyError" in kept
    assert kept[-1] == "ValueError"
    assert sum(line.startswith(f'  File "{__file__}", line ') for line in kept) == 3
    assert "            raise KeyError(prompt)".strip() in [line.strip() for line in kept]
    assert span.status.message == "ValueError"


def test_text_in_the_name_of_a_span_is_cut():
    data, event = spans({}, place="event")
    span = data.resource_spans[0].scope_spans[0].spans[0]
    span.name = event.name = SECRET * 20
    assert remove_sample_text(data)
    assert len(span.name) == len(event.name) == MAX_TEXT


def test_quotations_are_kept_if_asked_for(tmp_path):
    data, _ = spans({"input.value": SECRET})
    span, _ = post(tmp_path, data, keep_sample_text=True)
    assert span.attributes["input.value"] == SECRET


def test_a_request_without_any_is_stored_as_it_came(tmp_path):
    data, _ = spans({"gen_ai.request.model": "policy"})
    post(tmp_path, data)
    with sqlite3.connect(tmp_path / "admin.sqlite") as connection:
        [[blob]] = connection.execute("SELECT blob FROM span_chunks").fetchall()
    assert blob == data.SerializeToString()


VALUES = st.recursive(
    st.one_of(st.text(max_size=2 * MAX_TEXT), st.binary(max_size=2 * MAX_TEXT), st.integers(0, 9)),
    lambda parts: st.one_of(
        st.lists(parts, max_size=3), st.dictionaries(st.text(max_size=9), parts, max_size=3)
    ),
    max_leaves=8,
)


def text_length(value):
    if isinstance(value, list):
        return sum(map(text_length, value))
    if isinstance(value, dict):
        return sum(len(key) + text_length(one) for key, one in value.items())
    return len(value) if isinstance(value, str | bytes) else 0


@given(st.dictionaries(st.sampled_from([*QUOTING, *KEPT, "a", "note"]), VALUES), st.data())
def test_no_long_text_is_left_under_a_key_that_is_not_allowed(attributes, drawn):
    data, record = spans(attributes, place=drawn.draw(st.sampled_from(PLACES)))
    remove_sample_text(data)
    kept = {pair.key for pair in record.attributes}
    for key, value in attributes.items():
        if key in QUOTING:
            assert (key in kept) == (text_length(value) == 0)
        elif key in ("a", "note"):
            assert (key in kept) == (text_length(value) <= MAX_TEXT)
    assert record.dropped_attributes_count == len(attributes) - len(kept)
