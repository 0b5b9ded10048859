"""Metric series come to what was counted, whatever the temporality, the retries and the clocks."""

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

from dataplane_admin.ingest.limits import Limits
from dataplane_admin.ingest.metrics import batch_of_metrics
from dataplane_admin.store import Batch

DELTA, CUMULATIVE, UNSPECIFIED = 1, 2, 0
BEGIN = 1_790_000_000_000_000_000
S = 1_000_000_000
DAY = 86_400 * S


def batch(*points, kind="sum", temporality=CUMULATIVE, monotonic=True, resource=(), scope=""):
    """A request with the points (value, start, end) of one series; a value is a dict of fields."""
    data = MetricsData()
    made = data.resource_metrics.add()
    for pair in resource:
        made.resource.attributes.append(pair)
    scope_metrics = made.scope_metrics.add()
    scope_metrics.scope.name = scope
    metric = scope_metrics.metrics.add(name="lost")
    held = getattr(metric, kind)
    held.SetInParent()
    if kind in ("sum", "histogram", "exponential_histogram"):
        held.aggregation_temporality = temporality
    if kind == "sum":
        held.is_monotonic = monotonic
    for fields, start_ns, time_ns in points:
        told = fields if isinstance(fields, dict) else {"as_int": fields}
        held.data_points.add(start_time_unix_nano=start_ns, time_unix_nano=time_ns, **told)
    return batch_of_metrics(data, Limits())


def value(store):
    [row] = store.series()
    return row.value


def test_delta_points_add_up_and_those_sent_again_count_once(store):
    first = batch((100, BEGIN, BEGIN + S), temporality=DELTA)
    store.write(first)
    for count, at in ((3, 1), (2, 5)):  # with a gap
        store.write(batch((count, BEGIN + at * S, BEGIN + (at + 1) * S), temporality=DELTA))
    store.write(first)
    both = ((2, BEGIN + 5 * S, BEGIN + 6 * S), (1, BEGIN + 6 * S, BEGIN + 7 * S))
    store.write(batch(*both, temporality=DELTA))
    assert value(store) == 106


def test_a_request_with_many_points_of_a_series_counts_once(store):
    many = [(1, BEGIN + at, BEGIN + at + 1) for at in range(500)]
    for _ in range(2):
        store.write(batch(*many, temporality=DELTA))
    assert value(store) == 500


def test_a_counter_that_starts_anew_keeps_what_it_counted(store):
    for count, start_ns, time_ns in (
        (90, BEGIN, BEGIN + S),
        (100, BEGIN, BEGIN + 2 * S),
        (95, BEGIN, BEGIN + S + 1),  # overtaken on its way
        (3, BEGIN + 3 * S, BEGIN + 4 * S),
        (200, BEGIN + 5 * S, BEGIN + 6 * S),
        (99, BEGIN, BEGIN + S + 2),
    ):
        store.write(batch((count, start_ns, time_ns)))
    assert value(store) == 303


def test_a_counter_of_unknown_start_that_falls_started_anew(store):
    for at, count in enumerate((90, 100, 3, 4), 1):
        store.write(batch((count, 0, BEGIN + at * S)))
    assert value(store) == 104


def test_a_start_that_moves_a_little_is_the_same_counting(store):
    for at, count in enumerate((90, 91, 91, 95), 1):
        store.write(batch((count, BEGIN + at, BEGIN + at * S)))
    assert value(store) == 95


@pytest.mark.parametrize("wrong_ns", [60 * S, DAY, -DAY])
@pytest.mark.parametrize("kind", ["gauge", "sum"])
def test_a_point_of_a_wrong_clock_stops_no_series(store, kind, wrong_ns):
    store.write(batch((1, BEGIN, BEGIN + wrong_ns), kind=kind))
    store.write(batch((2, BEGIN, BEGIN + S), kind=kind))
    [row] = store.series()
    assert (row.value, row.time_ns) == (2, BEGIN + S)
    assert abs(row.received_ns - time.time_ns()) < 60 * S


def test_what_goes_up_and_down_is_its_newest_value(store):
    for at, count in enumerate((5, 2, 1), 1):
        store.write(batch((count, BEGIN + at * S, BEGIN + at * S + 1), monotonic=False))
    assert value(store) == 1
    store.write(batch((2, BEGIN + 2 * S, BEGIN + 2 * S + 1), monotonic=False))
    assert value(store) == 1, "sent again"


def test_no_recorded_value_is_no_zero(store):
    for fields in ({"flags": 1}, {}, {"as_double": math.nan}, {"as_double": math.inf}):
        for kind in ("gauge", "sum"):
            store.write(batch((fields, BEGIN, BEGIN + S), kind=kind))
    assert [row.value for row in store.series()] == [None, None]


def test_what_was_counted_stays_where_nothing_more_is_recorded(store):
    store.write(batch((4, BEGIN, BEGIN + 2 * S)))
    store.write(batch(({"flags": 1}, BEGIN, BEGIN + 3 * S)))
    assert value(store) == 4


def test_a_gauge_that_is_no_longer_recorded_has_no_value(store):
    store.write(batch((4, 0, BEGIN), kind="gauge"))
    store.write(batch(({"flags": 1}, 0, BEGIN + S), kind="gauge"))
    assert value(store) is None


def test_a_temporality_that_is_not_set_is_refused_by_name(store):
    refused = batch((1, BEGIN, BEGIN + S), temporality=UNSPECIFIED)
    assert (refused.series, len(refused.refused)) == ((), 1)
    assert "temporality" in refused.reasons[0]


def test_a_histogram_has_only_what_was_reported(store):
    store.write(batch(({"count": 3}, BEGIN, BEGIN + S), kind="histogram"))
    assert store.series()[0].histogram == {"count": 3}
    full = {"count": 2, "sum": 0.0, "min": 0.0, "max": 0.0}
    full |= {"bucket_counts": [1, 1], "explicit_bounds": [1.0]}
    other = batch((full, BEGIN, BEGIN + S), kind="histogram", scope="other")
    store.write(other)
    [found] = [row.histogram for row in store.series() if row.scope]
    assert found == {"count": 2, "sum": 0, "min": 0, "max": 0, "bounds": [1], "counts": [1, 1]}


@pytest.mark.parametrize(
    ("counts", "bounds"), [([], []), ([1], []), ([1, 2], []), ([1] * 201, list(range(200)))]
)
def test_buckets_that_do_not_fit_are_left_out(store, counts, bounds):
    fields = {"count": 3, "bucket_counts": counts, "explicit_bounds": bounds}
    store.write(batch((fields, BEGIN, BEGIN + S), kind="histogram"))
    fits = len(counts) == len(bounds) + 1 and len(bounds) < 200
    assert ("bounds" in store.series()[0].histogram) == fits


def test_delta_histograms_add_up(store):
    for at in range(3):
        fields = {"count": 2, "sum": 3.0, "min": 1.0 - at, "max": 2.0 + at}
        fields |= {"bucket_counts": [1, 1], "explicit_bounds": [1.5]}
        point = fields, BEGIN + at * S, BEGIN + (at + 1) * S
        for _ in range(2):
            store.write(batch(point, kind="histogram", temporality=DELTA))
    assert store.series()[0].histogram == {
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
def test_both_temporalities_come_to_what_was_counted(store, lives, repeats, clock):
    """A process is started again and again, and exports each count; some exports come twice."""
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
            store.write(batch(point, temporality=temporality, scope=scope))
            for again in repeats:
                if again < place:
                    store.write(batch(points[again], temporality=temporality, scope=scope))
    found = [row.value for row in store.series() if row.scope == scope]
    assert found == [sum(map(sum, lives))] * (2 if sent[DELTA] else 0)


@pytest.mark.parametrize(
    "temporality", [AggregationTemporality.DELTA, AggregationTemporality.CUMULATIVE]
)
def test_the_sdk_counts_the_same_in_either_temporality(store, temporality):
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
            store.write(batch_of_metrics(data, Limits()))
    provider.shutdown()
    lost, times = store.series("lost"), store.series("time")
    assert [row.value for row in lost] == [105]
    assert [(row.histogram["count"], row.histogram["sum"]) for row in times] == [(3, 105)]


def pair(key, **held):
    made = KeyValue(key=key)
    for kind, content in held.items():
        setattr(made.value, kind, content)
    return made


def names(*values):
    made = KeyValue(key="tags")
    made.value.array_value.SetInParent()
    for one in values:
        made.value.array_value.values.add(string_value=one)
    return made


SERVICE = pair("service.name", string_value="rollout")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (pair("k8s.pod.name", string_value="a"), pair("k8s.pod.name", string_value="b")),
        (pair("service.instance.id", int_value=1), pair("service.instance.id", int_value=2)),
        (pair("service.instance.id", int_value=1), pair("service.instance.id", string_value="1")),
        (names("a"), names("b")),
        (names("a", "b"), names("b", "a")),
        (pair("zone", string_value=""), pair("zone")),
    ],
)
def test_processes_that_differ_in_their_resource_have_series_that_differ(store, one, other):
    for count, fact in ((1, one), (2, other)):
        store.write(batch((count, BEGIN, BEGIN + S), resource=[SERVICE, fact]))
    rows = store.series()
    assert sorted(row.value for row in rows) == [1, 2]
    assert len({row.process for row in rows}) == len({row.process_id for row in rows}) == 2


def test_scopes_metrics_and_attributes_have_series_that_differ(store):
    data = MetricsData()
    resource = data.resource_metrics.add()
    for version in ("1", "2"):
        scope = resource.scope_metrics.add()
        scope.scope.name, scope.scope.version = "meter", version
        points = scope.metrics.add(name="depth").gauge.data_points
        for facts in ([], [names("a")], [names("b")], [pair("tags", int_value=1)]):
            points.add(as_int=len(points), time_unix_nano=BEGIN).attributes.extend(facts)
    store.write(batch_of_metrics(data, Limits()))
    rows = store.series("depth")
    assert sorted(row.value for row in rows) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert {str(row.attributes) for row in rows} == {
        "{}",
        "{'tags': ['a']}",
        "{'tags': ['b']}",
        "{'tags': 1}",
    }


def test_the_order_of_attributes_makes_no_other_series(store):
    pod = pair("k8s.pod.name", string_value="a")
    for at, resource in enumerate(([SERVICE, pod], [pod, SERVICE])):
        store.write(batch((at, BEGIN, BEGIN + at), resource=resource))
    assert value(store) == 1


def test_an_empty_batch_changes_no_series(store):
    assert store.write(Batch()).series == 0
