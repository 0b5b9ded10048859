"""Metrics of operations: names, units, labels that stay few, and what the store is asked."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from setup_processes import run
from structlog.testing import capture_logs
from tensordict import TensorDict

from dataplane_core import (
    DeadlineExceededError,
    InMemoryDataPlaneClient,
    StorageSummary,
    UnavailableError,
    telemetry,
)
from observability import InstrumentedDataPlaneClient, meters, step_context, trained
from observability.meters import MOST_CLASSES, OTHER, PartitionClasses


@pytest.fixture
def told(monkeypatch):
    """Metric name to its unit and its points as (attributes, point)."""
    reader = InMemoryMetricReader()
    provider = MeterProvider(metric_readers=[reader])
    traces = TracerProvider()
    monkeypatch.setattr(meters, "get_meter", provider.get_meter)
    monkeypatch.setattr(meters, "get_meter_provider", lambda: provider)
    monkeypatch.setattr(telemetry, "tracer", lambda: traces.get_tracer("test"))

    def read():
        data = reader.get_metrics_data()
        return {
            metric.name: (
                metric.unit,
                [(dict(point.attributes), point) for point in metric.data.data_points],
            )
            for resource in (data.resource_metrics if data else [])
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }

    yield read
    provider.shutdown()


@pytest.fixture
def client(told):
    with InstrumentedDataPlaneClient(InMemoryDataPlaneClient()) as client:
        client.register_partition("train_7", ["x"], 4, ["logprob", "train"])
        yield client


def batch(count):
    return TensorDict({"x": torch.zeros(count, 2)}, batch_size=[count])


def value_of(told, name, **attributes):
    wanted = {key.replace("__", "."): value for key, value in attributes.items()}
    [point] = [p for own, p in told()[name][1] if wanted.items() <= own.items()]
    return getattr(point, "value", None) if hasattr(point, "value") else point


def test_every_operation_has_a_duration_under_its_name_and_error(client, told):
    client.put_samples(["a", "b"], "train_7", batch(2))
    client.claim_meta("train_7", "train", ["x"], 2)
    client.get_samples(["a"], "train_7", ["x"])
    with pytest.raises(KeyError):
        client.get_samples(["a"], "nowhere", ["x"])
    unit, points = told()["messaging.client.operation.duration"]
    assert unit == "s"
    assert sorted(
        (own["messaging.operation.name"], own.get("error.type", ""), point.count)
        for own, point in points
    ) == [
        ("claim", "", 1),
        ("get", "", 1),
        ("get", "PartitionNotFoundError", 1),
        ("put", "", 1),
        ("register", "", 1),
    ]
    assert all(own["messaging.destination.name"] in ("train_#", "nowhere") for own, _ in points)


def test_bytes_are_counted_in_both_directions(client, told):
    client.put_samples(["a", "b"], "train_7", batch(2))
    client.get_samples(["a"], "train_7", ["x"])
    assert told()["dataplane.io"][0] == "By"
    assert value_of(told, "dataplane.io", dataplane__direction="put") == 16
    assert value_of(told, "dataplane.io", dataplane__direction="get") == 8


def test_outstanding_bytes_fall_with_a_clear(client, told):
    client.put_samples(["a", "b"], "train_7", batch(2))
    client.put_samples(["a", "b"], "train_7", batch(2))
    assert value_of(told, "dataplane.outstanding") == 16
    client.clear_samples(["a"], "train_7")
    assert value_of(told, "dataplane.outstanding") == 8


def test_ready_and_consumed_are_told_for_tasks_that_claim(client, told):
    client.put_samples(["a", "b", "c"], "train_7", batch(3))
    client.claim_meta("train_7", "train", ["x"], 2, blocking=False)
    assert value_of(told, "dataplane.ready", dataplane__task="train") == 1
    assert value_of(told, "dataplane.consumed", dataplane__task="train") == 2
    client.clear_samples(None, "train_7")
    assert told().get("dataplane.ready", ("", []))[1] == []


def test_the_age_of_what_is_claimed_is_since_its_put(client, told):
    client.put_samples(["a"], "train_7", batch(1))
    client.put_samples(["b"], "train_7", batch(1))
    client.claim_meta("train_7", "train", ["x"], 2, blocking=False)
    unit, [(own, point)] = told()["dataplane.claim.age"]
    assert (unit, own, point.count) == ("s", {"dataplane.task": "train"}, 2)
    assert 0 <= point.min <= point.max < 60


def test_staleness_is_the_difference_of_versions_of_each_sample(client, told):
    for version, sample_id in ((3, "a"), (5, "b")):
        with step_context("run", version, version):
            client.put_samples([sample_id], "train_7", batch(1))
    claimed = client.claim_meta("train_7", "train", ["x"], 2, blocking=False)
    with step_context("run", 6, 6):
        trained(client, claimed, field="x")
    unit, [(own, point)] = told()["rl.staleness"]
    assert (unit, own) == ("{version}", {"dataplane.task": "train"})
    assert (point.count, point.sum, point.min, point.max) == (2, 4, 1, 3)


def test_staleness_of_very_many_samples_is_told_in_proportion(client, told):
    ids = [f"s{number}" for number in range(4000)]
    for version, some in ((3, ids[:1000]), (5, ids[1000:3999]), (2, ids[3999:])):
        with step_context("run", version, version):
            client.put_samples(some, "train_7", batch(len(some)))
    claimed = client.claim_meta("train_7", "train", ["x"], 4000, blocking=False)
    with step_context("run", 6, 6):
        trained(client, claimed, field="x")
    _, [(_, point)] = told()["rl.staleness"]
    assert point.count == 8 + 24 + 1  # a quarter is 3 versions old, one sample 4, the others 1
    assert point.sum == 8 * 3 + 24 * 1 + 4


def test_labels_of_partitions_stay_few():
    classes = PartitionClasses()
    assert {classes.of(f"step_{number}") for number in range(1000)} == {"step_#"}
    assert classes.of("7f3e9a2c-11d2-4a4e-9a1b-0123456789ab/train") == "#/train"
    names = [f"{chr(97 + i % 26)}{chr(97 + i // 26)}z" for i in range(200)]
    labels = {classes.of(name) for name in names}
    assert len(labels | {"step_#", "#/train"}) == MOST_CLASSES + 1
    assert OTHER in labels
    assert classes.of("yet another") == OTHER
    assert classes.of("step_5") == "step_#"


@given(st.lists(st.text(), max_size=300))
def test_however_odd_the_names_the_labels_are_bounded(names):
    classes = PartitionClasses()
    labels = {classes.of(name) for name in names}
    assert len(labels) <= MOST_CLASSES + 1
    assert all(len(label) <= 64 for label in labels)


def test_a_store_that_fails_while_metrics_are_read_ends_nothing(client, told):
    client.put_samples(["a"], "train_7", batch(1))
    client.claim_meta("train_7", "train", ["x"], 1)
    client.close()
    assert told()["messaging.client.operation.duration"][1]


def test_of_several_clients_in_a_process_each_tells_what_went_through_it(client, told):
    client.put_samples(["a", "b"], "train_7", batch(2))
    with InstrumentedDataPlaneClient(InMemoryDataPlaneClient()) as second:
        second.register_partition("val", ["x"], 4, ["judge"])
        second.register_partition("train_8", ["x"], 4, ["judge"])
        second.put_samples(["a", "b", "c"], "val", batch(3))
        second.put_samples(["a"], "train_8", batch(1))
        second.claim_meta("val", "judge", ["x"], 2, blocking=False)
        outstanding = {
            own["messaging.destination.name"]: point.value
            for own, point in told()["dataplane.outstanding"][1]
        }
        assert outstanding == {"train_#": 16 + 8, "val": 24}
        assert value_of(told, "dataplane.ready", dataplane__task="judge") == 1
        assert value_of(told, "dataplane.consumed", dataplane__task="judge") == 2


@pytest.mark.parametrize("attached", [False, True])
def test_clients_of_one_store_tell_its_samples_once(told, attached):
    store = InMemoryDataPlaneClient()
    clients = [
        InstrumentedDataPlaneClient(InMemoryDataPlaneClient(bootstrap=False) if attached else store)
        for _ in range(3)
    ]
    clients[0].register_partition("train", ["x"], 4, ["train"])
    clients[0].put_samples(["a", "b", "c", "d"], "train", batch(4))
    for client in clients:
        client.claim_meta("train", "train", ["x"], 1, blocking=False)
    assert value_of(told, "dataplane.ready", dataplane__task="train") == 1
    assert value_of(told, "dataplane.consumed", dataplane__task="train") == 3
    store.close()


def claiming(store, *, partition="train_7", samples=4):
    """A client of a store that has claimed one of its samples for the task "train"."""
    client = InstrumentedDataPlaneClient(store)
    client.register_partition(partition, ["x"], samples, ["train"])
    client.put_samples([f"s{i}" for i in range(samples)], partition, batch(samples))
    client.claim_meta(partition, "train", ["x"], 1, blocking=False)
    return client


def test_equal_partitions_of_two_stores_are_told_together(told):
    with claiming(InMemoryDataPlaneClient()), claiming(InMemoryDataPlaneClient(), samples=3):
        assert value_of(told, "dataplane.ready", dataplane__task="train") == 3 + 2
        assert value_of(told, "dataplane.consumed", dataplane__task="train") == 2


def test_a_store_is_asked_once_a_collection_for_each_place(told):
    class Asked(InMemoryDataPlaneClient):
        questions = 0

        def count_samples(self, *asked):
            self.questions += 1
            return super().count_samples(*asked)

    store = Asked()
    clients = [claiming(store)]
    for _ in range(2):  # one of them wrapped again
        clients.append(InstrumentedDataPlaneClient(clients[-1]))
        clients[-1].claim_meta("train_7", "train", ["x"], 1, blocking=False)
    before = store.questions
    found = told()
    assert store.questions == before + 1
    values = {
        name: found[name][1][0][1].value for name in ("dataplane.ready", "dataplane.consumed")
    }
    assert values == {"dataplane.ready": 1, "dataplane.consumed": 3}
    clients[0].put_samples(["more"], "train_7", batch(1))
    assert value_of(told, "dataplane.ready", dataplane__task="train") == 2
    store.close()


def test_a_store_that_raises_anything_costs_its_own_series_only_and_is_told_of_once(told):
    class Foreign(InMemoryDataPlaneClient):
        def count_samples(self, *asked):
            raise RuntimeError("an adapter's own mistake")

        def list_storage(self):
            if self.made:
                raise RuntimeError("an adapter's own mistake")
            return [StorageSummary(name="u0", node="n", capacity=1, used=1, free=0)]

        made = False

    foreign = Foreign()
    with (
        claiming(InMemoryDataPlaneClient()),
        claiming(foreign, partition="val_1") as other,
        capture_logs() as logs,
    ):
        foreign.made = True
        for _ in range(2):
            found = told()
            for name in ("dataplane.ready", "dataplane.consumed", "dataplane.outstanding"):
                assert [own["messaging.destination.name"] for own, _ in found[name][1]] == [
                    "train_#"
                ]
            other.claim_meta("val_1", "train", ["x"], 1, blocking=False)
    assert [line["event"] for line in logs] == ["store_not_counted"]


class Counting(InMemoryDataPlaneClient):
    """Counts what it is asked, and can be away."""

    def __init__(self):
        super().__init__()
        self.asked = []
        self.error = None

    def count_samples(self, partition_id, *asked):
        self.asked.append(partition_id)
        if self.error is not None:
            raise self.error
        return super().count_samples(partition_id, *asked)


@pytest.mark.parametrize("error", [UnavailableError("away"), DeadlineExceededError("late")])
def test_a_store_that_was_away_is_told_of_again_and_is_asked_once_while_it_is(told, error):
    store = Counting()
    with claiming(store, partition="train_1"), claiming(store, partition="val") as client:
        client.register_partition("last", ["x"], 1, ["train"])
        client.put_samples(["a"], "last", batch(1))
        client.claim_meta("last", "train", ["x"], 1)
        store.asked.clear()
        store.error = error
        with claiming(InMemoryDataPlaneClient(), partition="other"):
            [(own, _)] = told()["dataplane.ready"][1]
        assert own["messaging.destination.name"] == "other"
        assert len(store.asked) == 1
        store.error = None
        assert len(told()["dataplane.ready"][1]) == 3


def test_a_place_that_is_gone_is_not_asked_for_again(told):
    store = Counting()
    with claiming(store) as client:
        client.clear_samples(None, "train_7")
        for _ in range(2):
            assert told().get("dataplane.ready", ("", []))[1] == []
        assert store.asked == ["train_7"]


def test_of_many_places_those_claimed_from_last_are_told(told, monkeypatch):
    monkeypatch.setattr(meters, "_MOST_WATCHED", 3)

    def places():
        return {own["messaging.destination.name"] for own, _ in told()["dataplane.ready"][1]}

    with claiming(InMemoryDataPlaneClient(), partition="a") as client:

        def claim(partition):
            client.register_partition(partition, ["x"], 1, ["train"])
            client.claim_meta(partition, "train", ["x"], 1, blocking=False)

        for partition in "bcc":
            claim(partition)
        assert places() == {"a", "b", "c"}
        for partition in "ad":
            claim(partition)
        assert places() == {"a", "c", "d"}


def test_bytes_of_equal_units_of_two_stores_are_told_together_and_those_of_one_once(told):
    class Stored(InMemoryDataPlaneClient):
        def __init__(self, used):
            super().__init__()
            self.used = used

        def list_storage(self):
            return [StorageSummary(name="u0", node="n", capacity=999, used=self.used, free=1)]

    one, other = Stored(300), Stored(4)
    clients = [InstrumentedDataPlaneClient(store) for store in (one, one, other)]
    [(own, point)] = told()["dataplane.outstanding"][1]
    assert (own, point.value) == ({"dataplane.unit": "u0"}, 304)
    for client in clients:
        client.close()


def test_a_client_that_was_closed_tells_nothing_any_more_and_is_let_go_of(client, told):
    client.put_samples(["a", "b"], "train_7", batch(2))
    client.close()
    assert told().get("dataplane.outstanding", ("", []))[1] == []
    with InstrumentedDataPlaneClient(InMemoryDataPlaneClient()) as second:
        second.register_partition("train_7", ["x"], 4, [])
        second.put_samples(["a"], "train_7", batch(1))
        assert value_of(told, "dataplane.outstanding") == 8


def test_neither_is_one_that_was_forgotten(told):
    store = InMemoryDataPlaneClient()
    client = InstrumentedDataPlaneClient(store)
    client.register_partition("train_7", ["x"], 4, [])
    client.put_samples(["a"], "train_7", batch(1))
    told()
    kept = weakref.ref(client._observers[2])
    del client
    gc.collect()
    assert kept() is None
    assert told().get("dataplane.outstanding", ("", []))[1] == []
    store.close()


def test_clients_from_before_and_after_the_set_up_are_told_together_and_not_by_a_fork():
    ran = run(
        """
import torch
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from tensordict import TensorDict
from dataplane_core import InMemoryDataPlaneClient
from observability import InstrumentedDataPlaneClient

def client(partition):
    made = InstrumentedDataPlaneClient(InMemoryDataPlaneClient())
    made.register_partition(partition, ["x"], 1, [])
    made.put_samples(["a"], partition, TensorDict({"x": torch.zeros(1)}, [1]))
    return made

def outstanding(reader):
    [found] = reader.get_metrics_data().resource_metrics
    return sorted(
        point.attributes["messaging.destination.name"]
        for metric in found.scope_metrics[0].metrics
        if metric.name == "dataplane.outstanding"
        for point in metric.data.data_points
    )

before = client("before")
reader = InMemoryMetricReader()
metrics.set_meter_provider(MeterProvider([reader]))
after = client("after")
tell(found=outstanding(reader))
if (child := os.fork()) == 0:
    from observability import meters
    own = InMemoryMetricReader()
    provider = MeterProvider([own])
    meters.get_meter = provider.get_meter
    childs = client("child")
    tell(found=outstanding(own))
    os._exit(0)
os.waitpid(child, 0)
"""
    )
    assert ran.told == [{"found": ["after", "before"]}, {"found": ["child"]}]
