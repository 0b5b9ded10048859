"""Traces with missing spans or wrong clocks are marked."""

import pytest
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality, MetricsData
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

DELTA = AggregationTemporality.AGGREGATION_TEMPORALITY_DELTA
CUMULATIVE = AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE
TRACE, ROOT, TRAIN = bytes(range(16)), b"rootroot", b"traintra"
SECOND = 1_000_000_000
BEGAN = 1_790_000_000 * SECOND
AHEAD = 45 * SECOND
NOTE = "the clock of host worker is 44.0 s or more ahead; its times are shifted earlier"
PROCESSES = {
    "grpo.driver": {"service.name": "grpo.driver", "host.name": "head", "process.pid": 7},
    "grpo.policy": {"service.name": "grpo.policy", "host.name": "worker", "process.pid": 7},
    "another": {"service.name": "grpo.driver", "host.name": "head", "process.pid": 8},
}


@pytest.fixture
def job(job, otlp):
    """Send a step of five seconds in which the worker trained from second one to four."""
    data = TracesData()
    trained = BEGAN + AHEAD + SECOND, BEGAN + AHEAD + 4 * SECOND
    for process, span_id, parent, name, (start, end) in (
        ("grpo.driver", ROOT, b"", "grpo.step", (BEGAN, BEGAN + 5 * SECOND)),
        ("grpo.policy", TRAIN, ROOT, "train", trained),
    ):
        target = data.resource_spans.add()
        otlp.set(target.resource.attributes, PROCESSES[process])
        span = target.scope_spans.add().spans.add(
            trace_id=TRACE,
            span_id=span_id,
            parent_span_id=parent,
            name=name,
            start_time_unix_nano=start,
            end_time_unix_nano=end,
        )
        otlp.set(span.attributes, {"rl.step": 0})
    job.send(data)
    return job


def test_a_trace_corrects_and_names_wrong_clocks(job):
    trace = job.trace(TRACE)
    assert (trace["clocks"], trace["seconds"]) == ([NOTE], 5)
    assert [(row["name"], row["start_s"], row["seconds"]) for row in trace["rows"]] == [
        ("grpo.step", 0, 5),
        ("train", 2, 3),
    ]
    assert NOTE in job.client.get("/trace", params={"id": TRACE.hex()}).text
    compared = job.get("trace/compare", a=TRACE.hex(), b=TRACE.hex())
    assert compared["notes"] == [f"A: {NOTE}", f"B: {NOTE}"]
    assert compared["a"]["seconds"] == 5


def test_a_sample_lifecycle_keeps_order_and_links(job, otlp):
    for process, name, at, span_id in (
        ("grpo.policy", "read", BEGAN + AHEAD + 2 * SECOND, TRAIN),
        ("grpo.driver", "put", BEGAN + SECOND // 2, ROOT),
        ("grpo.driver", "cleared", BEGAN + 9 * SECOND // 2, ROOT),
    ):
        data = otlp.log(name, ["sample-1"], trace_id=TRACE, span_id=span_id)
        [resource_logs] = data.resource_logs
        resource_logs.resource.Clear()
        otlp.set(resource_logs.resource.attributes, PROCESSES[process])
        resource_logs.scope_logs[0].log_records[0].time_unix_nano = at
        job.send(data)
    hops = job.get("sample", id="sample-1")["hops"]
    assert [(hop["name"], hop["seconds"], hop["span_id"]) for hop in hops] == [
        ("put", 0, ROOT.hex()),
        ("read", 2.5, TRAIN.hex()),
        ("cleared", 4, ROOT.hex()),
    ]
    assert {hop["trace_id"] for hop in hops} == {TRACE.hex()}


@pytest.fixture
def drop(job, otlp):
    """Report the records that a process dropped, by signal and reason."""

    def send(process, counts, *, at=3_000, temporality=CUMULATIVE):
        data = MetricsData()
        target = data.resource_metrics.add()
        otlp.set(target.resource.attributes, PROCESSES[process])
        metric = target.scope_metrics.add().metrics.add(name="dataplane.telemetry.dropped")
        metric.sum.is_monotonic = True
        metric.sum.aggregation_temporality = temporality
        for (signal, reason), count in counts.items():
            point = metric.sum.data_points.add(as_int=count, time_unix_nano=at)
            facts = {"dataplane.signal": signal, "dataplane.reason": reason}
            otlp.set(point.attributes, facts)
        job.send(data)

    return send


def incomplete(job):
    return job.trace(TRACE)["incomplete"]


def test_spans_dropped_by_a_process_of_the_step_are_reported(job, drop):
    drop("grpo.driver", {("spans", "queue_full"): 0})
    assert incomplete(job) == []
    lost = {("spans", "queue_full"): 3, ("spans", "export_failed"): 4, ("events", "shutdown"): 9}
    drop("grpo.driver", lost)
    [reason] = incomplete(job)
    assert reason.startswith("grpo.driver dropped 7 spans")
    assert "dropped 7 spans" in job.client.get("/trace", params={"id": TRACE.hex()}).text


def test_dropped_spans_are_counted_from_deltas(job, drop):
    for at, count in enumerate((3, 0, 0), 1):
        for _ in range(2):  # the second is a retry
            drop("grpo.driver", {("spans", "queue_full"): count}, at=at, temporality=DELTA)
    [reason] = incomplete(job)
    assert reason.startswith("grpo.driver dropped 3 spans")


def test_spans_dropped_by_other_processes_are_not_reported(job, drop):
    drop("another", {("spans", "queue_full"): 3})
    drop("grpo.driver", {("events", "queue_full"): 3})
    assert incomplete(job) == []
