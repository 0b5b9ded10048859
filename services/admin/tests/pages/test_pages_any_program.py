"""A trace of any program with the OpenTelemetry SDK: exceptions, processes, no buckets."""

import contextlib
import html
import re

import pytest
from fastapi.testclient import TestClient
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.logs.v1.logs_pb2 import LogsData
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

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
    with tracer.start_as_current_span("POST /generate", kind=SpanKind.SERVER) as root:
        root.set_attributes({"gen_ai.request.model": "policy", "gen_ai.usage.output_tokens": 1234})
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


def page(client, span, **query):
    context = span.get_span_context()
    query |= {"id": f"{context.trace_id:032x}", "span": f"{context.span_id:016x}"}
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


def log_of(span, body):
    context = span.get_span_context()
    data = LogsData()
    data.resource_logs.add().scope_logs.add().log_records.add(
        trace_id=context.trace_id.to_bytes(16, "big"),
        span_id=context.span_id.to_bytes(8, "big"),
        severity_number=13,
        time_unix_nano=span.start_time,
    ).body.string_value = body
    return data.SerializeToString()


def test_a_log_is_shown_in_the_panel_of_its_span(client, spans, keep_sample_text):
    client.post("/v1/logs", content=log_of(spans[0], "asked <b>twice</b>"), headers=HEADERS)
    panel = page(client, spans[0]).partition("All logs")[0]
    assert "WARN" in panel
    assert ("asked <b>twice</b>" in panel) == keep_sample_text
    assert ("--keep-sample-text" in panel) != keep_sample_text
    assert "WARN" not in page(client, spans[1]).partition("All logs")[0]


def test_kind_service_and_statistics_of_a_span_are_shown(client, spans):
    text = page(client, spans[1])
    assert re.search(r"Kind\s*server\s*Service\s*vllm", text)
    assert re.search(r"POST /generate\s*vllm\s*server\s*1", text)
    assert re.search(r"llm_request\s*vllm\s*internal\s*1\s*1", text)
    assert re.search(r"POST /generate\s*policy\s*vllm\s*1\s*-\s*1,234", text)


def test_a_name_marks_its_spans_only(client, spans):
    context = spans[0].get_span_context()
    query = {"id": f"{context.trace_id:032x}", "name": "llm_request", "service": "vllm"}
    text = client.get("/trace", params=query).text
    fall = text.partition('id="chart"')[2].partition('class="chart-names"')[0]
    bars = re.findall(r'class="bar( dim)?"[^>]*data-key="([0-9a-f]+)"', fall)
    dimmed = {key for dim, key in bars if dim}
    assert dimmed == {f"{spans[1].get_span_context().span_id:016x}"}
    assert len(bars) == 2


def test_span_names_are_sorted_as_requested(client, spans):
    for order, names in (
        ("", ["POST /generate", "llm_request"]),
        ("ascending", ["llm_request", "POST /generate"]),
    ):
        table = page(client, spans[0], sort="total", order=order).partition("Span names")[2]
        rows = re.findall("POST /generate|llm_request", table.partition("Flame graph")[0])
        assert rows == names
    context = spans[0].get_span_context()
    query = {"id": f"{context.trace_id:032x}", "sort": "color"}
    answer = client.get("/trace", params=query)
    assert answer.status_code == 422
    assert "ort is 'color'; expected one of count, errors, total" in html.unescape(answer.text)


def frames(client, spans, **query):
    context = spans[0].get_span_context()
    answer = client.get("/trace", params={"id": f"{context.trace_id:032x}", **query})
    graph = answer.text.partition('class="flame"')[2].partition("</section>")[0]
    drawn = re.findall(r'data-key="([0-9a-f]+)".*?data-from="([^"]*)" data-to="([^"]*)"', graph)
    return {key: (float(begin), float(end)) for key, begin, end in drawn}


def test_a_frame_is_as_wide_as_its_share_of_its_parent_and_zooms(client, spans):
    child, root = ((span.end_time - span.start_time) for span in spans)
    (_, root_frame), (key, part) = frames(client, spans).items()
    assert root_frame == (0.0, 100.0)
    assert part == pytest.approx((0.0, 100 * child / root), abs=0.01)
    assert frames(client, spans, frame=key)[key] == (0.0, 100.0)
