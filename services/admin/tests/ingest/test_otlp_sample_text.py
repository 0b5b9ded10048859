"""What samples say is not kept unless somebody asked for it."""

import os
import sqlite3

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from google.protobuf.json_format import MessageToDict
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

from dataplane_admin.ingest import Limits, router
from dataplane_admin.ingest.sample_text import forget_sample_text, may_quote
from dataplane_admin.store import Store

SECRET = "what the user said"
TRACE = bytes(range(16))
PROTOBUF = {"content-type": "application/x-protobuf"}
QUOTING = [
    "gen_ai.input.messages",
    "gen_ai.prompt.0.content",
    "llm.output_messages.0.message.content",
    "input.value",
    "traceloop.entity.output",
]


def spans(keys, *, in_event=False):
    data = TracesData()
    span = (
        data.resource_spans.add()
        .scope_spans.add()
        .spans.add(
            trace_id=TRACE,
            span_id=os.urandom(8),
            name="chat",
            start_time_unix_nano=1,
            end_time_unix_nano=2,
        )
    )
    told = span.events.add(name="message") if in_event else span
    for key in keys:
        told.attributes.add(key=key).value.string_value = SECRET
    span.attributes.add(key="gen_ai.request.model").value.string_value = "policy"
    return data


def post(folder, data, *, as_json=False, **options):
    path = folder / "admin.sqlite"
    with Store.open(f"sqlite:///{path}") as store:
        app = FastAPI()
        app.include_router(router(store, Limits(), **options))
        client = TestClient(app)
        if as_json:
            body = MessageToDict(data)
            span = body["resourceSpans"][0]["scopeSpans"][0]["spans"][0]
            span["traceId"], span["spanId"] = TRACE.hex(), os.urandom(8).hex()
            answer = client.post("/v1/traces", json=body)
        else:
            answer = client.post("/v1/traces", content=data.SerializeToString(), headers=PROTOBUF)
        assert answer.status_code == 200
        [span] = store.trace_records(TRACE.hex()).spans
    kept = b"".join(one.read_bytes() for one in folder.glob("admin.sqlite*"))
    return span, SECRET.encode() in kept


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("in_event", [False, True])
@pytest.mark.parametrize("key", QUOTING)
def test_quotations_are_not_written_and_the_rest_of_the_span_is(tmp_path, key, in_event, as_json):
    span, written = post(tmp_path, spans([key], in_event=in_event), as_json=as_json)
    assert not written
    assert span.attributes == {"gen_ai.request.model": "policy"}


def test_quotations_are_kept_if_asked_for(tmp_path):
    span, written = post(tmp_path, spans(["input.value"]), keep_sample_text=True)
    assert written
    assert span.attributes["input.value"] == SECRET


def test_the_file_of_a_request_without_any_holds_it_as_it_came(tmp_path):
    data = spans([])
    post(tmp_path, data)
    with sqlite3.connect(tmp_path / "admin.sqlite") as connection:
        [[blob]] = connection.execute("SELECT blob FROM span_chunks").fetchall()
    assert blob == data.SerializeToString()


@given(st.lists(st.sampled_from([*QUOTING, "input", "llm.token_count", "gen_ai.prompts"])))
def test_what_is_taken_out_is_found_by_its_bytes_and_counted(keys):
    data = spans(keys)
    body = data.SerializeToString()
    changed = forget_sample_text(data)
    assert changed == any(key in QUOTING for key in keys)
    assert not changed or may_quote(body)
    span = data.resource_spans[0].scope_spans[0].spans[0]
    assert span.dropped_attributes_count == sum(key in QUOTING for key in keys)
    kept = [pair.key for pair in span.attributes]
    assert kept == [*(key for key in keys if key not in QUOTING), "gen_ai.request.model"]
