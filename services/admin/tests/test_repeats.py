"""Open, resent and partial exports: list, page, status and metrics agree."""

import os
import re
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opentelemetry.proto.logs.v1.logs_pb2 import LogsData
from opentelemetry.proto.trace.v1.trace_pb2 import Status, TracesData
from waiting import until

from dataplane_admin import Retention

TRACE = b"t" * 16
BEGIN = 1_790_000_000_000_000_000
END = BEGIN + 4_000_000_000


def request(*spans, trace_id=TRACE):
    """Return a request of spans (letter, start, end, whether it failed); ``r`` is the root."""
    data = TracesData()
    target = data.resource_spans.add().scope_spans.add().spans
    for letter, start_ns, end_ns, *failed in spans:
        span = target.add(
            trace_id=trace_id,
            span_id=letter.encode() * 8,
            parent_span_id=b"" if letter == "r" else b"r" * 8,
            name=letter,
            start_time_unix_nano=start_ns,
            end_time_unix_nano=end_ns,
        )
        if any(failed):
            span.status.code = Status.STATUS_CODE_ERROR
    return data


def counts(job):
    """Return the numbers of spans that each place shows."""
    [listed] = job.get("traces")["traces"]
    status, metrics = job.counts(), job.client.get("/metrics").text
    samples = [
        re.search(rf"^{name} (\S+)$", metrics, re.M)[1]
        for name in (
            "dataplane_admin_store_spans",
            'dataplane_admin_ingested_total{signal="spans"}',
        )
    ]
    trace = job.trace(TRACE)
    shown = [len(trace["rows"]), trace["spans"], listed["spans"], status["spans"]]
    return {*shown, status["ingested"]["spans"], *(int(float(sample)) for sample in samples)}


def test_spans_resent_in_other_portions_count_once(job):
    first, second = [("r", BEGIN, END), ("a", BEGIN, END)], [("b", BEGIN, END)]
    for portion in (first, second, first, [*first, *second], first[:1], second):
        job.send(request(*portion))
    assert counts(job) == {3}
    assert job.counts()["repeated"] == 7


SPANS = st.lists(
    st.tuples(st.sampled_from("rabcde"), st.just(BEGIN), st.sampled_from([0, END]), st.booleans()),
    min_size=1,
    max_size=6,
)


def test_totals_match_rows_after_any_retries(job):
    @given(st.lists(SPANS, min_size=1, max_size=5))
    @settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def agrees(portions):
        trace_id = os.urandom(16)
        before = job.counts()
        for portion in portions:
            job.send(request(*portion, trace_id=trace_id))
        trace, after = job.trace(trace_id), job.counts()
        failed = sum(row["outcome"] == "error" for row in trace["rows"])
        assert (trace["spans"], trace["errors"]) == (len(trace["rows"]), failed)
        assert after["spans"] - before["spans"] == trace["spans"]
        sent = sum(map(len, portions))
        assert after["repeated"] - before["repeated"] == sent - trace["spans"]

    agrees()


def test_spans_deleted_by_retention_count_as_new(job_of):
    job = job_of(retention=Retention(max_age_s=0.2))
    job.send(request(("r", BEGIN, END)))
    until(lambda: not job.counts()["traces"], seconds=60)
    job.send(request(("r", BEGIN, END)))
    assert job.counts()["ingested"]["spans"] == 2


def test_an_event_without_a_time_counts_once(job, later):
    data = LogsData()
    record = data.resource_logs.add().scope_logs.add().log_records.add(event_name="dataplane.put")
    record.body.string_value = '["a"]'
    for _ in range(2):
        job.send(data)
        later(5)
    [hop] = job.get("sample", id="a")["hops"]
    assert abs(hop["time_ns"] - time.time_ns()) < 60 * 10**9
    assert job.counts()["events"] == 1


def test_an_open_span_has_no_duration(job):
    job.send(request(("r", BEGIN, 0), ("a", BEGIN, END)))
    trace = job.trace(TRACE)
    assert (trace["has_root"], trace["seconds"], trace["start_ns"]) == (False, 4.0, BEGIN)
    assert [row["seconds"] for row in trace["rows"]] == [None, 4.0]
    assert trace["incomplete"] == ["no end was reported for 'r' of unknown"]
    page = job.client.get("/trace", params={"id": TRACE.hex(), "span": (b"r" * 8).hex()}).text
    assert "n/a" in page
    assert not re.search(r"-\d+[ .\d]* (%|s|min)", page)
    job.send(request(("r", BEGIN, END), ("a", BEGIN, 0)))
    trace = job.trace(TRACE)
    assert (trace["has_root"], trace["incomplete"]) == (True, [])
    assert [row["seconds"] for row in trace["rows"]] == [4.0, 4.0]
    assert counts(job) == {2}


@pytest.mark.parametrize(
    ("spans", "start_ns", "durations"),
    [
        ([("r", BEGIN, END), ("a", 0, END), ("b", 0, 0)], BEGIN, [4.0, None, None]),
        ([("a", 0, 0)], None, [None]),
    ],
)
def test_a_missing_time_is_not_1970(job, spans, start_ns, durations):
    job.send(request(*spans))
    trace = job.trace(TRACE)
    assert trace["start_ns"] == start_ns
    assert [row["seconds"] for row in trace["rows"]] == durations
    for path in ("/", "/traces", f"/trace?id={TRACE.hex()}"):
        page = job.client.get(path)
        assert (page.status_code, "1970" in page.text) == (200, False)
    assert start_ns or "n/a" in job.client.get("/traces").text
