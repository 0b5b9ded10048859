"""Metric series have the right totals for any temporality, retries and clocks."""

import math
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import MetricsData
from opentelemetry.sdk.metrics import Counter, Histogram, MeterProvider
from opentelemetry.sdk.metrics.export import AggregationTemporality, InMemoryMetricReader
from opentelemetry.sdk.resources import Resource

DELTA, CUMULATIVE, UNSPECIFIED = 1, 2, 0
BEGIN = 1_790_000_000_000_000_000
S = 1_000_000_000
DAY = 86_400 * S


def metrics(*points, kind="sum", temporality=CUMULATIVE, monotonic=True, resource=(), scope=""):
    """Return a request with points (value, start, end) of one series; a value may be a dict."""
    data = MetricsData()
    target = data.resource_metrics.add()
    for pair in resource:
        target.resource.attributes.append(pair)
    scope_metrics = target.scope_metrics.add()
    scope_metrics.scope.name = scope
    metric = scope_metrics.metrics.add(name="lost")
    held = getattr(metric, kind)
    held.SetInParent()
    if kind in ("sum", "histogram", "exponential_histogram"):
        held.aggregation_temporality = temporality
    if kind == "sum":
        held.is_monotonic = monotonic
    for fields, start_ns, time_ns in points:
        numbers = fields if isinstance(fields, dict) else {"as_int": fields}
        held.data_points.add(start_time_unix_nano=start_ns, time_unix_nano=time_ns, **numbers)
    return data


def value(job):
    [row] = job.get("series")
    return row["value"]


def test_delta_points_add_up_and_resent_ones_count_once(job):
    first = metrics((100, BEGIN, BEGIN + S), temporality=DELTA)
    job.send(first)
    for count, at in ((3, 1), (2, 5)):  # with a gap
        job.send(metrics((count, BEGIN + at * S, BEGIN + (at + 1) * S), temporality=DELTA))
    job.send(first)
    both = ((2, BEGIN + 5 * S, BEGIN + 6 * S), (1, BEGIN + 6 * S, BEGIN + 7 * S))
    job.send(metrics(*both, temporality=DELTA))
    assert value(job) == 106


def test_a_request_with_many_points_of_a_series_counts_once(job):
    many = [(1, BEGIN + at, BEGIN + at + 1) for at in range(500)]
    for _ in range(2):
        job.send(metrics(*many, temporality=DELTA))
    assert value(job) == 500


def test_a_restarted_counter_keeps_its_total(job):
    for count, start_ns, time_ns in (
        (90, BEGIN, BEGIN + S),
        (100, BEGIN, BEGIN + 2 * S),
        (95, BEGIN, BEGIN + S + 1),  # overtaken by a later one
        (3, BEGIN + 3 * S, BEGIN + 4 * S),
        (200, BEGIN + 5 * S, BEGIN + 6 * S),
        (99, BEGIN, BEGIN + S + 2),
    ):
        job.send(metrics((count, start_ns, time_ns)))
    assert value(job) == 303


def test_a_falling_counter_of_unknown_start_was_restarted(job):
    for at, count in enumerate((90, 100, 3, 4), 1):
        job.send(metrics((count, 0, BEGIN + at * S)))
    assert value(job) == 104


def test_a_slightly_moving_start_is_no_restart(job):
    for at, count in enumerate((90, 91, 91, 95), 1):
        job.send(metrics((count, BEGIN + at, BEGIN + at * S)))
    assert value(job) == 95


@pytest.mark.parametrize("wrong_ns", [60 * S, DAY, -DAY])
@pytest.mark.parametrize("kind", ["gauge", "sum"])
def test_a_point_with_a_wrong_clock_does_not_stop_a_series(job, kind, wrong_ns):
    job.send(metrics((1, BEGIN, BEGIN + wrong_ns), kind=kind))
    job.send(metrics((2, BEGIN, BEGIN + S), kind=kind))
    [row] = job.get("series")
    assert (row["value"], row["time_ns"]) == (2, BEGIN + S)
    assert abs(row["received_ns"] - time.time_ns()) < 60 * S


def test_a_non_monotonic_sum_is_its_newest_value(job):
    for at, count in enumerate((5, 2, 1), 1):
        job.send(metrics((count, BEGIN + at * S, BEGIN + at * S + 1), monotonic=False))
    assert value(job) == 1
    job.send(metrics((2, BEGIN + 2 * S, BEGIN + 2 * S + 1), monotonic=False))
    assert value(job) == 1, "sent again"


def test_an_unset_value_is_not_zero(job):
    for fields in ({"flags": 1}, {}, {"as_double": math.nan}, {"as_double": math.inf}):
        for kind in ("gauge", "sum"):
            job.send(metrics((fields, BEGIN, BEGIN + S), kind=kind))
    assert [row["value"] for row in job.get("series")] == [None, None]


def test_a_counter_keeps_its_total_without_new_points(job):
    job.send(metrics((4, BEGIN, BEGIN + 2 * S)))
    job.send(metrics(({"flags": 1}, BEGIN, BEGIN + 3 * S)))
    assert value(job) == 4


def test_a_gauge_that_is_no_longer_recorded_has_no_value(job):
    job.send(metrics((4, 0, BEGIN), kind="gauge"))
    job.send(metrics(({"flags": 1}, 0, BEGIN + S), kind="gauge"))
    assert value(job) is None


def test_an_unset_temporality_is_rejected_by_name(job):
    refused = job.send(metrics((1, BEGIN, BEGIN + S), temporality=UNSPECIFIED))
    assert (job.get("series"), refused.rejected_data_points) == ([], 1)
    assert "temporality" in refused.error_message


def test_a_histogram_has_only_reported_figures(job):
    job.send(metrics(({"count": 3}, BEGIN, BEGIN + S), kind="histogram"))
    assert job.get("series")[0]["histogram"] == {"count": 3}
    full = {"count": 2, "sum": 0.0, "min": 0.0, "max": 0.0}
    full |= {"bucket_counts": [1, 1], "explicit_bounds": [1.0]}
    other = metrics((full, BEGIN, BEGIN + S), kind="histogram", scope="other")
    job.send(other)
    [histogram] = [row["histogram"] for row in job.get("series") if row["scope"]]
    assert histogram == {"count": 2, "sum": 0, "min": 0, "max": 0, "bounds": [1], "counts": [1, 1]}


@pytest.mark.parametrize(
    ("counts", "bounds"), [([], []), ([1], []), ([1, 2], []), ([1] * 201, list(range(200)))]
)
def test_invalid_buckets_are_dropped(job, counts, bounds):
    fields = {"count": 3, "bucket_counts": counts, "explicit_bounds": bounds}
    job.send(metrics((fields, BEGIN, BEGIN + S), kind="histogram"))
    fits = len(counts) == len(bounds) + 1 and len(bounds) < 200
    assert ("bounds" in job.get("series")[0]["histogram"]) == fits


def test_delta_histograms_add_up(job):
    for at in range(3):
        fields = {"count": 2, "sum": 3.0, "min": 1.0 - at, "max": 2.0 + at}
        fields |= {"bucket_counts": [1, 1], "explicit_bounds": [1.5]}
        point = fields, BEGIN + at * S, BEGIN + (at + 1) * S
        for _ in range(2):
            job.send(metrics(point, kind="histogram", temporality=DELTA))
    assert job.get("series")[0]["histogram"] == {
        "count": 6,
        "sum": 9,
        "min": -1,
        "max": 4,
        "bounds": [1.5],
        "counts": [3, 3],
    }


COUNTS = st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=4)


@given(
    lives=COUNTS, repeats=st.lists(st.integers(0, 20), max_size=8), clock=st.sampled_from([0, DAY])
)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_both_temporalities_have_the_same_total(job, lives, repeats, clock):
    """Check totals of a restarting process that exports each count, some of them twice."""
    now = BEGIN
    scope = str(time.perf_counter_ns())
    sent = {DELTA: [], CUMULATIVE: []}
    for place, counts in enumerate(lives):
        now += clock if place == 1 else S
        start, total = now, 0
        for count in counts:
            total += count
            sent[DELTA].append((count, now, now + S))
            sent[CUMULATIVE].append((total, start, now + S))
            now += S
    for temporality, points in sent.items():
        for place, point in enumerate(points):
            job.send(metrics(point, temporality=temporality, scope=scope))
            for again in repeats:
                if again < place:
                    job.send(metrics(points[again], temporality=temporality, scope=scope))
    values = [row["value"] for row in job.get("series") if row["scope"] == scope]
    assert values == [sum(map(sum, lives))] * (2 if sent[DELTA] else 0)


@pytest.mark.parametrize(
    "temporality", [AggregationTemporality.DELTA, AggregationTemporality.CUMULATIVE]
)
def test_the_sdk_counts_the_same_in_either_temporality(job, temporality):
    preferred = dict.fromkeys([Counter, Histogram], temporality)
    reader = InMemoryMetricReader(preferred_temporality=preferred)
    provider = MeterProvider([reader], resource=Resource({"service.name": "driver"}))
    meter = provider.get_meter("meter")
    counter, histogram = meter.create_counter("lost"), meter.create_histogram("time")
    for count in (100, 3, 2):
        counter.add(count)
        histogram.record(count)
        data = MetricsData.FromString(encode_metrics(reader.get_metrics_data()).SerializeToString())
        for _ in range(2):
            job.send(data)
    provider.shutdown()
    lost, times = job.get("series", name="lost"), job.get("series", name="time")
    assert [row["value"] for row in lost] == [105]
    assert [(row["histogram"]["count"], row["histogram"]["sum"]) for row in times] == [(3, 105)]


def pair(key, **held):
    attribute = KeyValue(key=key)
    for kind, content in held.items():
        setattr(attribute.value, kind, content)
    return attribute


def names(*values):
    attribute = KeyValue(key="tags")
    attribute.value.array_value.SetInParent()
    for name in values:
        attribute.value.array_value.values.add(string_value=name)
    return attribute


SERVICE = pair("service.name", string_value="rollout")


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (pair("k8s.pod.name", string_value="a"), pair("k8s.pod.name", string_value="b")),
        (pair("service.instance.id", int_value=1), pair("service.instance.id", int_value=2)),
        (pair("service.instance.id", int_value=1), pair("service.instance.id", string_value="1")),
        (names("a"), names("b")),
        (names("a", "b"), names("b", "a")),
        (pair("zone", string_value=""), pair("zone")),
    ],
)
def test_different_resources_have_different_series(job, left, right):
    for count, fact in ((1, left), (2, right)):
        job.send(metrics((count, BEGIN, BEGIN + S), resource=[SERVICE, fact]))
    rows = job.get("series")
    assert sorted(row["value"] for row in rows) == [1, 2]
    assert len({row["process"] for row in rows}) == 2


def test_scopes_metrics_and_attributes_distinguish_series(job):
    data = MetricsData()
    resource = data.resource_metrics.add()
    for version in ("1", "2"):
        scope = resource.scope_metrics.add()
        scope.scope.name, scope.scope.version = "meter", version
        points = scope.metrics.add(name="depth").gauge.data_points
        for facts in ([], [names("a")], [names("b")], [pair("tags", int_value=1)]):
            points.add(as_int=len(points), time_unix_nano=BEGIN).attributes.extend(facts)
    job.send(data)
    rows = job.get("series", name="depth")
    assert sorted(row["value"] for row in rows) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert {str(row["attributes"]) for row in rows} == {
        "{}",
        "{'tags': ['a']}",
        "{'tags': ['b']}",
        "{'tags': 1}",
    }


def test_the_order_of_attributes_does_not_matter(job):
    pod = pair("k8s.pod.name", string_value="a")
    for at, resource in enumerate(([SERVICE, pod], [pod, SERVICE])):
        job.send(metrics((at, BEGIN, BEGIN + at), resource=resource))
    assert value(job) == 1
