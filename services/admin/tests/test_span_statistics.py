"""Statistics of a trace: self times, names, paths, services and calls of models."""

import os
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.trace.v1.trace_pb2 import Status, TracesData

START_NS = 1_790_000_000_000_000_000
MILLISECOND = 10**6


class Trace:
    """Builder of a trace; times are milliseconds."""

    def __init__(self):
        self.id = os.urandom(16)
        self.data = TracesData()
        self._services = {}
        self._count = 0

    def span(self, name, start, end, parent=b"", service="app", kind=1, failed=False, **attributes):
        if service not in self._services:
            resource = self.data.resource_spans.add()
            resource.resource.attributes.add(key="service.name").value.string_value = service
            self._services[service] = resource.scope_spans.add().spans
        self._count += 1
        span = self._services[service].add(
            trace_id=self.id,
            span_id=self._count.to_bytes(8, "big"),
            parent_span_id=parent,
            name=name,
            kind=kind,
            start_time_unix_nano=START_NS + start * MILLISECOND,
            end_time_unix_nano=START_NS + end * MILLISECOND if end is not None else 0,
        )
        if failed:
            span.status.code = Status.STATUS_CODE_ERROR
        for key, value in attributes.items():
            held = span.attributes.add(key=f"gen_ai.{key.replace('__', '.')}").value
            match value:
                case int():
                    held.int_value = value
                case float():
                    held.double_value = value
                case list():
                    for item in value:
                        held.array_value.values.add(string_value=item)
                case _:
                    held.string_value = value
        return span.span_id


@pytest.fixture
def trace():
    return Trace()


def sent(job, trace):
    job.send(trace.data)
    return job.trace(trace.id)


def names(answer):
    return {row["name"]: row for row in answer["names"]}


def test_concurrent_children_count_once_in_self_time(job, trace):
    root = trace.span("root", 0, 100)
    for start, end in ((10, 40), (30, 50), (80, 140)):  # the last one outlives its parent
        trace.span("child", start, end, root)
    rows = names(sent(job, trace))
    assert rows["root"]["self_s"] == pytest.approx(0.040)
    assert (rows["child"]["count"], rows["child"]["total_s"]) == (3, pytest.approx(0.110))
    assert rows["child"]["active_s"] == pytest.approx(0.060)


def test_names_have_nearest_rank_percentiles_and_errors(job, trace):
    root = trace.span("root", 0, 1000)
    for number in range(1, 21):
        trace.span("call", 0, number, root, kind=3, failed=number > 18)
    trace.span("call", 0, None, root, kind=3)
    row = names(sent(job, trace))["call"]
    assert (row["count"], row["errors"], row["kind"], row["service"]) == (21, 2, "client", "app")
    assert [row[name] for name in ("p50_s", "p95_s", "max_s")] == pytest.approx([0.01, 0.019, 0.02])


def test_paths_come_parents_first_and_merge_equal_names(job, trace):
    root = trace.span("root", 0, 100)
    for start in (0, 50):
        above = trace.span("turn", start, start + 40, root)
        trace.span("get", start, start + 30, above, service="db")
        trace.span("put", start + 30, start + 35, above, service="db")
    answer = sent(job, trace)
    paths = [(row["depth"], row["service"], row["name"], row["count"]) for row in answer["paths"]]
    assert paths == [
        (0, "app", "root", 1),
        (1, "app", "turn", 2),
        (2, "db", "get", 2),
        (2, "db", "put", 2),
    ]
    assert answer["paths_omitted"] == 0
    assert answer["services"] == [
        {"service": "db", "spans": 4, "errors": 0},
        {"service": "app", "spans": 3, "errors": 0},
    ]
    assert answer["services_omitted"] == 0


def test_many_and_deep_paths_are_omitted_and_counted(job, trace):
    root = above = trace.span("root", 0, 9_000)
    for number in range(1_500):
        trace.span(f"name {number}", 0, number + 1, root)
    for _ in range(60):
        above = trace.span("deeper", 0, 8_000, above)
    answer = sent(job, trace)
    assert len(answer["paths"]) == 1_000
    assert answer["paths_omitted"] == 1_561 - 1_000
    assert max(row["depth"] for row in answer["paths"]) == 47
    assert "name 1499" in {row["name"] for row in answer["paths"]}
    assert (len(answer["names"]), answer["names_omitted"]) == (500, 1_502 - 500)


def test_all_services_of_a_trace_are_counted(job, trace):
    for number in range(150):
        trace.span("work", 0, 10, service=f"service {number}")
    answer = sent(job, trace)
    assert (len(answer["services"]), answer["services_omitted"]) == (100, 50)
    page = job.client.get("/trace", params={"id": trace.id.hex()}).text
    assert "<dt>Services</dt><dd>150</dd>" in page
    assert "and 138 more" in page


def test_model_calls_are_summed_by_operation_and_model(job, trace):
    root = trace.span("POST /chat", 0, 5_000, kind=2)
    for number, reason in enumerate(("stop", "stop", "length")):
        trace.span(
            "chat policy",
            0,
            1_000 * (number + 1),
            root,
            failed=number == 2,
            operation__name="chat",
            request__model="policy",
            provider__name="vllm",
            usage__input_tokens=100,
            usage__output_tokens=10,
            response__finish_reasons=[reason],
        )
    trace.span("chat policy", 0, 500, root, operation__name="chat", request__model="policy",
               system="vllm")  # fmt: skip
    [row] = sent(job, trace)["model_calls"]
    assert (row["operation"], row["model"], row["provider"]) == ("chat", "policy", "vllm")
    assert (row["calls"], row["errors"]) == (4, 1)
    assert (row["input_tokens"], row["output_tokens"]) == (300, 30)
    assert (row["p50_s"], row["p95_s"]) == (1.0, 3.0)
    assert row["tokens_per_s"] == pytest.approx(30 / 6)
    assert row["finish_reasons"] == {"stop": 2, "length": 1}


def test_spans_of_vllm_have_its_latencies_and_tokens(job, trace):
    trace.span(
        "llm_request",
        0,
        9_000,  # vLLM's spans end when their request is reported, not when it ended
        service="vllm",
        latency__e2e=2.0,
        latency__time_to_first_token=0.25,
        usage__prompt_tokens=7,
        usage__completion_tokens=40,
        request__id="r1",
    )
    [row] = sent(job, trace)["model_calls"]
    assert (row["operation"], row["model"], row["provider"]) == ("llm_request", "", "")
    assert (row["p50_s"], row["first_token_p50_s"], row["tokens_per_s"]) == (2.0, 0.25, 20.0)
    assert (row["input_tokens"], row["output_tokens"]) == (7, 40)


def test_wrong_types_of_model_attributes_count_as_absent(job, trace):
    trace.span(
        "x",
        0,
        10,
        operation__name=["chat"],
        request__model=7,
        usage__output_tokens="many",
        latency__e2e=float("nan"),
        response__finish_reasons="stop",
    )
    [row] = sent(job, trace)["model_calls"]
    assert (row["operation"], row["model"], row["output_tokens"]) == ("x", "", None)
    assert (row["p50_s"], row["tokens_per_s"], row["finish_reasons"]) == (0.01, None, {})


def test_a_requested_span_is_shown_however_short(job, trace):
    root = trace.span("root", 0, 9_000)
    short = trace.span("short", 0, 0, root)
    for number in range(2_000):
        trace.span("long", 0, 5 + number, root)
    job.send(trace.data)
    page = job.client.get("/trace", params={"id": trace.id.hex(), "span": short.hex()})
    assert "was not received for this trace" not in page.text
    assert "<h2>short</h2>" in page.text


def test_a_page_of_10000_spans_draws_the_longest_and_counts_the_rest(job, trace):
    root = trace.span("root", 0, 9_000)
    long = [trace.span("long", 0, 8_999 - number, root).hex() for number in range(5_000)]
    short = [trace.span("short", 0, 3_999 - number // 2, root).hex() for number in range(4_999)]
    job.send(trace.data)

    def page(**query):
        """Return the page's text, the ids of its bars, and those that are not marked."""
        text = job.client.get("/trace", params={"id": trace.id.hex(), **query}).text
        bars = re.findall(r'<a class="bar( dim)?" href="[^"]*" data-stop data-key="(\w+)"', text)
        return text, {key for _, key in bars}, {key for dim, key in bars if dim}

    text, drawn, _ = page()
    assert drawn == {root.hex(), *long[:1_499]}
    assert '8,500 short spans omitted. <a href="#names-head">Select a name</a>' in text
    assert 'id="names-head"' in text
    assert re.findall(r'<td class="n">([\d,]+)</td><td class="n wide-only bad">', text) == [
        "5,000",
        "4,999",
        "1",
    ]
    assert text.count('<span class="indent"') == 400
    assert "9,600 more spans omitted." in text
    _, drawn, dim = page(name="short")
    assert drawn == {root.hex(), *long[:499], *short[:1_000]}
    assert dim == {root.hex(), *long[:499]}
    text, drawn, _ = page(span=short[-1])
    assert "was not received for this trace" not in text
    assert "<h2>short</h2>" in text


@pytest.fixture(scope="module")
def shared(tmp_path_factory, job_class, app_of):
    with job_class(app_of()) as job:
        yield job


@given(
    tree=st.lists(
        st.tuples(st.integers(0, 99), st.integers(0, 60), st.integers(0, 60)), max_size=12
    )
)
def test_self_times_agree_with_counting_each_moment(shared, tree):
    trace = Trace()
    spans = [("s0", None, 0, 60)]
    ids = [trace.span("s0", 0, 60)]
    for number, (above, start, end) in enumerate(tree, 1):
        parent = above % len(ids)
        start, end = min(start, end), max(start, end)
        spans.append((f"s{number}", parent, start, end))
        ids.append(trace.span(f"s{number}", start, end, ids[parent]))
    rows = names(sent(shared, trace))
    for place, (name, _, start, end) in enumerate(spans):
        children = [span for span in spans if span[1] == place]
        moments = [
            moment
            for moment in range(start, end)
            if not any(child[2] <= moment < child[3] for child in children)
        ]
        assert rows[name]["self_s"] == pytest.approx(len(moments) / 1e3)
