"""Sample text is stored only on request.

Most tests call `remove_sample_text`: the API does not show stored log records, scopes and data
points, and there are many hundreds of cases. So internals are imported.
"""

import json
import os
import traceback

import pytest
from google.protobuf.json_format import MessageToDict
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.logs.v1.logs_pb2 import LogsData
from opentelemetry.proto.metrics.v1.metrics_pb2 import MetricsData
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData
from stored import stored_bytes

from dataplane_admin.ingest.sample_text import MAX_TEXT, remove_sample_text

SECRET = "what the user said"
TRACE = bytes(range(16))
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
    "llm.prompt_token_ids",
    "token_ids",
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


def set_value(value: AnyValue, content) -> None:
    if isinstance(content, list):
        for item in content:
            set_value(value.array_value.values.add(), item)
    elif isinstance(content, dict):
        for key, item in content.items():
            set_value(value.kvlist_value.values.add(key=key).value, item)
    else:
        kind = {str: "string", bytes: "bytes", bool: "bool", int: "int", float: "double"}
        setattr(value, f"{kind[type(content)]}_value", content)


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
    for key, content in attributes.items():
        set_value(record.attributes.add(key=key).value, content)
    return data, record


def as_json(data):
    body = MessageToDict(data)
    span = body["resourceSpans"][0]["scopeSpans"][0]["spans"][0]
    for named in (span, *span.get("links", ())):
        named["traceId"], named["spanId"] = TRACE.hex(), os.urandom(8).hex()
    return json.dumps(body)


@pytest.mark.parametrize("content", ["protobuf", "json"])
@pytest.mark.parametrize("place", PLACES)
def test_sample_text_is_removed_and_the_rest_stored(job, tmp_path, place, content):
    attributes = (
        dict.fromkeys(QUOTING, SECRET) | {"nested": {"any": [SECRET, "x" * MAX_TEXT]}} | KEPT
    )
    data, _ = spans(attributes, place=place)
    if content == "json":
        assert job.post("traces", as_json(data), "application/json").status_code == 200
    else:
        job.send(data)
    stored = stored_bytes(tmp_path)
    assert SECRET.encode() not in stored
    for key in KEPT:
        assert key.encode() in stored


def test_facts_about_model_process_and_operation_are_stored():
    data, span = spans(KEPT)
    before = data.SerializeToString()
    assert not remove_sample_text(data)
    assert data.SerializeToString() == before
    assert len(span.attributes) == len(KEPT)


def test_short_text_under_a_neutral_key_is_stored():
    data, span = spans({"a": "x" * MAX_TEXT, "b": "x" * (MAX_TEXT + 1), "c": [SECRET] * 8})
    assert remove_sample_text(data)
    assert [pair.key for pair in span.attributes] == ["a"]


@pytest.mark.parametrize(
    "content",
    [
        f'[{{"content": "{SECRET}", "role": "user"}}]',  # "events" of pydantic-ai
        f' {{"note": "{SECRET}"}}',  # "metadata" of OpenInference
        "data:image/png;base64,iVBORw0KGgo=",  # "image.url" of OpenInference
        [0] * (MAX_TEXT + 1),
    ],
)
def test_documents_and_long_lists_are_removed(content):
    data, span = spans({"a": content, "rl.sample_ids": content, "b": [1, 2]})
    assert remove_sample_text(data)
    assert [pair.key for pair in span.attributes] == ["rl.sample_ids", "b"]


def test_sample_text_is_removed_from_logs_and_metrics():
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


def test_exceptions_keep_types_and_frames_only():
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


@pytest.mark.parametrize("content", [[SECRET], {"text": SECRET}, SECRET.encode()])
def test_a_stack_trace_that_is_not_text_is_not_stored(job, tmp_path, content):
    data, event = spans({"exception.stacktrace": content, "a": 1}, place="event")
    job.send(data)
    assert SECRET.encode() not in stored_bytes(tmp_path)
    assert remove_sample_text(data)
    assert [pair.key for pair in event.attributes] == ["a"]


def test_a_long_span_name_is_cut():
    data, event = spans({}, place="event")
    span = data.resource_spans[0].scope_spans[0].spans[0]
    span.name = event.name = SECRET * 20
    assert remove_sample_text(data)
    assert len(span.name) == len(event.name) == MAX_TEXT


def test_sample_text_is_stored_on_request(job_of):
    job = job_of(keep_sample_text=True)
    job.send(spans({"input.value": SECRET})[0])
    assert job.trace(TRACE)["rows"][0]["attributes"]["input.value"] == SECRET


def test_a_request_without_sample_text_is_stored_unchanged(job, tmp_path):
    data, _ = spans({"gen_ai.request.model": "policy"})
    job.send(data)
    assert data.SerializeToString() in stored_bytes(tmp_path)


VALUES = st.recursive(
    st.one_of(st.text(max_size=2 * MAX_TEXT), st.binary(max_size=2 * MAX_TEXT), st.integers(0, 9)),
    lambda parts: st.one_of(
        st.lists(parts, max_size=3), st.dictionaries(st.text(max_size=9), parts, max_size=3)
    ),
    max_leaves=8,
)


def text_length(value):
    if isinstance(value, list):
        return sum(1 if isinstance(item, int) else text_length(item) for item in value)
    if isinstance(value, dict):
        return sum(len(key) + text_length(item) for key, item in value.items())
    return len(value) if isinstance(value, str | bytes) else 0


@given(st.dictionaries(st.sampled_from([*QUOTING, *KEPT, "a", "note"]), VALUES), st.data())
def test_long_text_is_stored_under_allowed_keys_only(attributes, drawn):
    data, record = spans(attributes, place=drawn.draw(st.sampled_from(PLACES)))
    remove_sample_text(data)
    kept = {pair.key for pair in record.attributes}
    for key, value in attributes.items():
        if key in QUOTING:
            assert (key in kept) == (text_length(value) == 0)
        elif key in ("a", "note"):
            is_document = isinstance(value, str) and value.lstrip().startswith(("{", "[", "data:"))
            assert (key in kept) == (text_length(value) <= MAX_TEXT and not is_document)
    assert record.dropped_attributes_count == len(attributes) - len(kept)


@given(st.lists(st.dictionaries(st.sampled_from(["a", "input.value", "rl.step"]), VALUES)))
def test_records_with_equal_keys_are_judged_by_their_values(records):
    together, _ = spans({})
    for attributes in records:
        _, record = spans(attributes)
        together.resource_spans[0].scope_spans[0].spans.add().CopyFrom(record)
    remove_sample_text(together)
    alone = [spans(attributes) for attributes in records]
    for data, _ in alone:
        remove_sample_text(data)
    kept = [span.attributes for span in together.resource_spans[0].scope_spans[0].spans[1:]]
    assert kept == [record.attributes for _, record in alone]
