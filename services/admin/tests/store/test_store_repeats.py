"""Exporters send again what was not answered, as a whole or in part: everything counts once."""

import os
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opentelemetry.proto.logs.v1.logs_pb2 import LogsData
from opentelemetry.proto.trace.v1.trace_pb2 import Status, TracesData

from dataplane_admin.ingest.events import batch_of_logs
from dataplane_admin.ingest.limits import Limits
from dataplane_admin.ingest.spans import batch_of_spans
from dataplane_admin.store import Batch, Store, TraceFilter
from observability.views.tree import Tree

BEGIN = 1_790_000_000_000_000_000


def request(trace_id, *spans):
    """A request with spans of (number, whether it has ended, whether it failed)."""
    data = TracesData()
    made = data.resource_spans.add().scope_spans.add().spans
    for number, ended, failed in spans:
        span = made.add(
            trace_id=trace_id,
            span_id=number.to_bytes(8, "big"),
            parent_span_id=b"" if number == 1 else (1).to_bytes(8, "big"),
            name=f"span {number}",
            start_time_unix_nano=BEGIN + number,
            end_time_unix_nano=BEGIN + 100 + number if ended else 0,
        )
        if failed:
            span.status.code = Status.STATUS_CODE_ERROR
    return batch_of_spans(data, data.SerializeToString(), Limits())


def agree(store, trace_id):
    """Spans and failed ones of a trace, of which rows, list and totals say the same."""
    rows = Tree(store.trace_records(trace_id.hex()).spans).spans
    failed = sum(span.outcome == "error" for span in rows)
    found = store.trace(trace_id.hex())
    assert (found.spans, found.errors) == (len(rows), failed)
    assert found in store.traces(TraceFilter(error=failed > 0), limit=1_000)[0]
    return len(rows), failed


def test_spans_that_are_sent_again_in_part_count_once(store):
    trace_id = os.urandom(16)
    first, second = [(1, True, True), (2, True, False)], [(2, True, False), (3, True, True)]
    for spans in ([*first], [*second], [*first, *second], [(3, True, True)], [*first, *first]):
        store.write(request(trace_id, *spans))
        agree(store, trace_id)
    assert agree(store, trace_id) == (3, 2)
    totals = store.totals()
    assert (totals.spans, totals.ingested_spans, totals.repeated) == (3, 3, 10)


def test_an_open_span_and_its_finished_copy_count_once(store):
    trace_id = os.urandom(16)
    store.write(request(trace_id, (1, False, False), (2, True, False)))
    found = store.trace(trace_id.hex())
    assert (found.has_root, found.spans, found.start_ns) == (False, 2, BEGIN + 1)
    store.write(request(trace_id, (1, True, True)))
    found = store.trace(trace_id.hex())
    assert (found.has_root, found.spans, found.errors) == (True, 2, 1)
    store.write(request(trace_id, (1, False, False), (2, False, True)))
    assert store.trace(trace_id.hex()).errors == 1
    assert agree(store, trace_id) == (2, 1)


def test_a_trace_without_times_has_none_until_one_is_reported(store):
    trace_id = os.urandom(16)
    data = TracesData()
    span = (
        data.resource_spans.add()
        .scope_spans.add()
        .spans.add(trace_id=trace_id, span_id=b"8" * 8, parent_span_id=b"9" * 8)
    )
    store.write(batch_of_spans(data, None, Limits()))
    found = store.trace(trace_id.hex())
    assert (found.start_ns, found.end_ns, found.seconds) == (0, 0, 0)
    store.write(request(trace_id, (1, True, False)))
    span.span_id = b"7" * 8
    store.write(batch_of_spans(data, None, Limits()))
    found = store.trace(trace_id.hex())
    assert (found.start_ns, found.end_ns) == (BEGIN + 1, BEGIN + 101)
    assert found.name == "span 1"


def test_records_that_are_refused_or_ignored_count_once(store):
    data = LogsData()
    records = data.resource_logs.add().scope_logs.add().log_records
    for text in ("one", "two"):
        records.add(severity_text=text)
    records.add(event_name="dataplane.put").body.int_value = 3
    for count in (3, 3, 1):
        del records[count:]
        store.write(batch_of_logs(data.__deepcopy__({}), Limits(), time.time_ns()))
    totals = store.totals()
    assert (totals.refused, totals.ignored, totals.events) == (1, 2, 0)


def test_an_event_without_a_time_counts_once(store):
    data = LogsData()
    record = data.resource_logs.add().scope_logs.add().log_records.add(event_name="dataplane.put")
    record.body.string_value = '["a"]'
    for seconds in (0, 5):
        now_ns = time.time_ns() + seconds * 10**9
        store.write(batch_of_logs(data.__deepcopy__({}), Limits(), now_ns))
    [event] = store.sample_records("a").events
    assert abs(event.time_ns - time.time_ns()) < 60 * 10**9
    assert store.totals().events == 1


def test_spans_that_retention_dropped_are_new_again(new_url):
    trace_id = os.urandom(16)
    from dataplane_admin.store import Retention

    with Store.open(new_url(), retention=Retention(max_age_s=0.2)) as store:
        store.write(request(trace_id, (1, True, False)))
        until = time.monotonic() + 60
        while store.totals().traces and time.monotonic() < until:
            time.sleep(0.05)
            store.write(Batch())
        assert store.totals().spans == 0
        assert store.write(request(trace_id, (1, True, False))).spans == 1


SPANS = st.lists(st.tuples(st.integers(1, 6), st.booleans(), st.booleans()), min_size=1, max_size=6)


@pytest.mark.parametrize("together", [False, True])
def test_whatever_is_sent_again_all_totals_agree_with_the_rows(store, together):
    @given(st.lists(SPANS, min_size=1, max_size=5))
    @settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def agrees(portions):
        trace_id = os.urandom(16)
        before = store.totals()
        batches = [request(trace_id, *spans) for spans in portions]
        if together:
            waiting = [store.submit(batch) for batch in batches]
            new = sum(done.result(60).spans for done in waiting)
        else:
            new = sum(store.write(batch).spans for batch in batches)
        spans, _ = agree(store, trace_id)
        after = store.totals()
        assert new == spans == after.spans - before.spans
        sent = sum(map(len, portions))
        assert after.repeated - before.repeated == sent - spans

    agrees()
