"""A trace of any program with the OpenTelemetry SDK: exceptions, processes, no buckets."""

import contextlib
import html
import re

import pytest
from fastapi.testclient import TestClient
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from dataplane_admin import Settings, create_app

HEADERS = {"content-type": "application/x-protobuf"}
RESOURCE = {"service.name": "vllm", "k8s.pod.name": "generator-3", "process.pid": 17}


def parse(prompt):
    raise ValueError(f"no number in {prompt}")


@pytest.fixture
def spans():
    exporter = InMemorySpanExporter()
    provider = TracerProvider(resource=Resource(RESOURCE), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("vllm.tracing", "0.32.0")
    with tracer.start_as_current_span("POST /generate") as root:
        root.add_event("preempted", {"blocks": 3, "<b>": "<i>"})
        with contextlib.suppress(ValueError), tracer.start_as_current_span("llm_request"):
            parse("the sample")
    return exporter.get_finished_spans()


@pytest.fixture(params=[False, True], ids=["without text", "with text"])
def keep_sample_text(request):
    return request.param


@pytest.fixture
def client(spans, keep_sample_text, tmp_path):
    store_url = f"sqlite:///{tmp_path / 'store.sqlite'}"
    settings = Settings(store_url=store_url, keep_sample_text=keep_sample_text)
    body = encode_spans(spans).SerializeToString()
    with TestClient(create_app(settings), base_url="http://127.0.0.1") as asking:
        assert asking.post("/v1/traces", content=body, headers=HEADERS).status_code == 200
        yield asking


def page(client, span):
    context = span.get_span_context()
    query = {"id": f"{context.trace_id:032x}", "span": f"{context.span_id:016x}"}
    answer = client.get("/trace", params=query)
    assert answer.status_code == 200
    return html.unescape(re.sub(r"<wbr>|<[^>]*>", "", answer.text))


def test_an_exception_is_shown_with_its_frames(client, spans, keep_sample_text):
    [failed, _] = spans
    text = page(client, failed)
    assert f'File "{__file__}", line' in text
    assert "in parse" in text
    assert re.search(r"exception at \d", text)
    assert ("ValueError: no number in the sample" in text) == keep_sample_text
    assert "ValueError" in text


def test_an_event_of_a_span_is_shown_with_its_attributes(client, spans):
    text = page(client, spans[1])
    assert re.search(r"preempted at \d", text)
    assert re.search(r"blocks\s*3", text)
    assert re.search(r"<b>\s*<i>", text)


def test_the_process_of_a_span_is_shown_with_its_resource(client, spans):
    text = page(client, spans[1])
    for name, value in RESOURCE.items():
        assert re.search(rf"{re.escape(name)}\s*{value}", text)
    assert "vllm.tracing 0.32.0" in text


def test_without_buckets_no_bubble_is_shown(client, spans):
    text = page(client, spans[1])
    assert "no span of this trace has rl.bucket" in text
    assert not re.search(r"\d\s*%\s*busy|bubble \d|Productive", text)
    assert re.search(r"ProcessTime by bucketBusyBubble\s*vllm\s*n/an/a", text)


def test_the_api_gives_events_and_resource(client, spans):
    trace_id = f"{spans[0].get_span_context().trace_id:032x}"
    trace = client.get("/api/v1/trace", params={"id": trace_id}).json()
    [time] = trace["process_times"]
    assert time["resource"].items() >= RESOURCE.items()
    assert (time["busy_s"], time["bubble_s"], trace["buckets"]) == (None, None, {})
    [event] = trace["rows"][1]["events"]
    assert event["name"] == "exception"
    assert event["attributes"]["exception.type"] == "ValueError"
