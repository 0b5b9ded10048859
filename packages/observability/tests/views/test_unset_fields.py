"""Zero and empty mean "not set" in OTLP; views never use them as values."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.logs.v1.logs_pb2 import LogsData
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

from observability.records import (
    Process,
    Records,
    decode_logs,
    decode_traces,
    distinct_labels,
)
from observability.views import (
    chrome_trace,
    critical_path,
    lineage_of,
    page_of,
    process_times,
    steps_of,
    why,
)

BEGIN = 1_790_000_000_000_000_000
END = BEGIN + 4_000_000_000
TRACE = b"t" * 16


def request(*spans, resource=()):
    """Return an encoded request with a span for each (id, parent, start, end)."""
    data = TracesData()
    result = data.resource_spans.add()
    for key, value in resource:
        result.resource.attributes.add(key=key).value.string_value = value
    scope = result.scope_spans.add()
    for span_id, parent, start_ns, end_ns in spans:
        span = scope.spans.add(
            trace_id=TRACE,
            span_id=span_id * 8,
            parent_span_id=parent * 8,
            name="grpo.step",
            start_time_unix_nano=start_ns,
            end_time_unix_nano=end_ns,
        )
        span.attributes.add(key="rl.step").value.int_value = 3
        span.attributes.add(key="rl.bucket").value.string_value = "productive"
    return data.SerializeToString()


def step(*bodies):
    [result] = steps_of(Records([span for body in bodies for span in decode_traces(body).spans]))
    return result


def test_a_finished_copy_wins_over_an_open_one():
    open_copy, finished_copy = request((b"r", b"", BEGIN, 0)), request((b"r", b"", BEGIN, END))
    for copies in (
        [open_copy, finished_copy],
        [finished_copy, open_copy],
        [open_copy, finished_copy, open_copy],
    ):
        result = step(*copies)
        assert (result.seconds, result.incomplete) == (4.0, [])


def test_an_open_root_ends_with_its_last_span():
    result = step(request((b"r", b"", BEGIN, 0), (b"c", b"r", BEGIN, END)))
    assert result.seconds == 4.0
    assert result.root.reported_seconds is None
    assert result.incomplete == ["no end was reported for 'grpo.step' of unknown"]


def test_a_child_without_times_starts_with_its_parent():
    result = step(request((b"r", b"", BEGIN, END), (b"c", b"r", 0, 0), (b"d", b"c", 0, 0)))
    assert (result.start_ns, result.end_ns) == (BEGIN, END)
    assert {span.start_ns for span in result.spans} == {BEGIN}


def test_a_span_without_a_start_does_not_start_in_1970():
    result = step(request((b"c", b"x", 0, END), (b"d", b"x", BEGIN, END)))
    assert result.start_ns == BEGIN


def test_an_all_zero_parent_id_means_no_parent():
    [span] = decode_traces(request((b"r", b"\0", BEGIN, END))).spans
    assert span.parent_id is None


def test_clocks_are_not_corrected_by_unreported_times():
    caller = request((b"r", b"", BEGIN, END), resource=[("host.name", "a")])
    for start_ns, end_ns in ((BEGIN, 0), (0, END), (0, 0)):
        callee = request((b"c", b"r", start_ns, end_ns), resource=[("host.name", "b")])
        assert step(caller, callee).clock_offsets == {}


TIMES = st.sampled_from([0, 1, BEGIN, END, 2**63 - 1, 2**63, 2**64 - 1])
IDS = st.sampled_from([b"", b"\0", b"a", b"b", b"c", b"d"])


@given(
    st.lists(st.tuples(st.sampled_from([b"a", b"b", b"c", b"d"]), IDS, TIMES, TIMES), max_size=9)
)
def test_views_accept_any_times_and_parents(spans):
    steps = steps_of(decode_traces(request(*spans)))
    for step in steps:
        assert step.seconds >= 0
        assert all(segment.seconds > 0 for segment in critical_path(step))
        assert all(time.bubble_seconds >= 0 for time in process_times(step))
        reported_times = [at for _, _, *times in spans for at in times if at]
        assert not reported_times or step.start_ns >= min(reported_times)
    json.dumps(chrome_trace(steps))


def decode_log(*records):
    data = LogsData()
    scope = data.resource_logs.add().scope_logs.add()
    for name, time_ns, trace_id in records:
        record = scope.log_records.add(
            event_name=f"dataplane.{name}", time_unix_nano=time_ns, trace_id=trace_id
        )
        record.body.string_value = '["a"]'
        record.attributes.add(key="dataplane.partition").value.string_value = "train"
    return decode_logs(data.SerializeToString())


def test_an_event_without_a_time_uses_that_of_its_predecessor():
    hops = lineage_of(
        "a", decode_log(("put", BEGIN, b""), ("claimed", 0, b""), ("trained", END, b""))
    )
    assert [hop.seconds for hop in hops] == [0.0, 0.0, 4.0]
    hops = lineage_of("a", decode_log(("put", 0, b""), ("trained", END, b"")))
    assert [hop.seconds for hop in hops] == [0.0, 0.0]


def test_a_repeated_event_without_a_time_is_one_hop():
    events = [
        replace(event, received_ns=at)
        for at in (BEGIN, END)
        for event in decode_log(("put", 0, b""), ("claimed", 0, b"")).events
    ]
    hops = lineage_of("a", Records([], events))
    assert [(hop.name, hop.seconds) for hop in hops] == [("put", 0.0), ("claimed", 0.0)]


def test_a_wait_without_a_time_has_not_lasted_since_1970():
    assert [wait.seconds for wait in why(decode_log(("waiting", 0, b"")), END)] == [0.0]


@pytest.mark.parametrize("trace_id", [b"", bytes(16), b"short"])
def test_an_event_with_an_invalid_trace_id_belongs_to_no_trace(trace_id):
    assert decode_log(("put", BEGIN, trace_id)).events[0].trace_id == ""


def test_invalid_utf8_changes_only_its_own_string():
    body = request((b"r", b"", BEGIN, END), resource=[("k8s.pod.name", "abcd")])
    [span] = decode_traces(body.replace(b"abcd", b"a\xff\xfed")).spans
    assert span.process.resource == {"k8s.pod.name": "a��d"}


def test_processes_with_different_resources_are_distinct():
    name = [("service.name", "rollout")]
    processes = [
        decode_traces(request((b"r", b"", BEGIN, END), resource=[*name, *extra])).spans[0].process
        for extra in ([("k8s.pod.name", "a")], [("k8s.pod.name", "b")], [("zone", "z")], [])
    ]
    assert len(set(processes)) == 4
    labels = distinct_labels(processes)
    assert list(labels.values())[:3] == ["rollout (a)", "rollout (b)", "rollout (zone=z)"]
    assert len(set(labels.values())) == 4


def test_attribute_order_does_not_distinguish_processes():
    pairs = [("service.name", "rollout"), ("host.name", "a")]
    first, second = (
        decode_traces(request((b"r", b"", BEGIN, END), resource=attributes)).spans[0].process
        for attributes in (pairs, pairs[::-1])
    )
    assert first == second


def test_an_integer_instance_is_part_of_the_label():
    data = TracesData()
    spans = data.resource_spans.add()
    spans.resource.attributes.add(key="service.instance.id").value.int_value = 7
    spans.resource.attributes.add(key="service.name").value.string_value = ""
    spans.scope_spans.add().spans.add(trace_id=TRACE, span_id=b"s" * 8)
    [span] = decode_traces(data.SerializeToString()).spans
    assert span.process.label == "unknown 7"


def test_labels_differ_if_only_the_identities_differ():
    processes = [Process("a", identity="1" * 32), Process("a", identity="2" * 32)]
    assert len(set(distinct_labels(processes).values())) == 2
    assert distinct_labels([replace(processes[0], pid=7), processes[1]])[processes[1]] != "a"


def test_a_page_shows_the_duration_of_an_open_span_as_unknown():
    result = step(request((b"r", b"", BEGIN, END), (b"c", b"r", BEGIN, 0)))
    assert "n/a, starts at 0 s" in page_of([result])
