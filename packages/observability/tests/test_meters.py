"""Metrics of operations: names, units, bounded labels, and queries to the store."""

from __future__ import annotations

import gc

import pytest
import torch
from setup_processes import run_script
from structlog.testing import capture_logs
from tensordict import TensorDict

from dataplane_core import (
    DeadlineExceededError,
    InMemoryDataPlaneClient,
    StorageSummary,
    UnavailableError,
)
from observability import InstrumentedDataPlaneClient, record_trained, step_context

MAX_LABELS = 32
MAX_WATCHED = 64
PARTITION, TASK = "messaging.destination.name", "dataplane.task"


class Metrics:
    """Reader of the metrics that the SDK collects."""

    def __init__(self, reader):
        self._reader = reader

    def read(self):
        """Return unit and points (attributes, point) by metric name."""
        data = self._reader.get_metrics_data()
        return {
            metric.name: (metric.unit, [(dict(p.attributes), p) for p in metric.data.data_points])
            for resource in (data.resource_metrics if data else [])
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }

    def points(self, name):
        return self.read().get(name, ("", []))[1]

    def values(self, name, label=PARTITION):
        return {labels[label]: point.value for labels, point in self.points(name)}

    def states(self, task="train"):
        """Return the numbers of ready and of acknowledged samples of a task."""
        read = self.read()
        return tuple(
            next(point.value for labels, point in read[name][1] if labels[TASK] == task)
            for name in ("dataplane.ready", "dataplane.acknowledged")
        )


@pytest.fixture
def metrics(sdk):
    return Metrics(sdk.metrics)


@pytest.fixture
def client(metrics):
    with InstrumentedDataPlaneClient(InMemoryDataPlaneClient()) as client:
        client.register_partition("train_7", ["x"], 4, ["logprob", "train"])
        yield client


def batch(count):
    return TensorDict({"x": torch.zeros(count, 2)}, batch_size=[count])


def client_with_claim(store, *, partition="train_7", samples=4):
    """Return a client of a store that has claimed one sample for the task "train"."""
    client = InstrumentedDataPlaneClient(store)
    client.register_partition(partition, ["x"], samples, ["train"])
    client.put_samples([f"s{i}" for i in range(samples)], partition, batch(samples))
    client.claim_meta(partition, "train", ["x"], 1, blocking=False)
    return client


def test_every_operation_has_a_duration_under_its_name_and_error(client, metrics):
    client.put_samples(["a", "b"], "train_7", batch(2))
    client.claim_meta("train_7", "train", ["x"], 2)
    client.get_samples(["a"], "train_7", ["x"])
    with pytest.raises(KeyError):
        client.get_samples(["a"], "nowhere", ["x"])
    unit, points = metrics.read()["messaging.client.operation.duration"]
    assert unit == "s"
    assert sorted(
        (labels["messaging.operation.name"], labels.get("error.type", ""), point.count)
        for labels, point in points
    ) == [
        ("claim", "", 1),
        ("get", "", 1),
        ("get", "PartitionNotFoundError", 1),
        ("put", "", 1),
        ("register", "", 1),
    ]
    assert {labels[PARTITION] for labels, _ in points} == {"train_#", "nowhere"}


def test_bytes_are_counted_by_direction_and_until_a_clear(client, metrics):
    for _ in range(2):
        client.put_samples(["a", "b"], "train_7", batch(2))
    client.get_samples(["a"], "train_7", ["x"])
    assert metrics.read()["dataplane.io"][0] == "By"
    assert metrics.values("dataplane.io", "dataplane.direction") == {"put": 32, "get": 8}
    assert metrics.values("dataplane.outstanding") == {"train_#": 16}
    client.clear_samples(["a"], "train_7")
    assert metrics.values("dataplane.outstanding") == {"train_#": 8}


def test_claim_age_counts_from_the_put(client, metrics):
    for sample_id in "ab":
        client.put_samples([sample_id], "train_7", batch(1))
    client.claim_meta("train_7", "train", ["x"], 2, blocking=False)
    unit, [(labels, point)] = metrics.read()["dataplane.claim.age"]
    assert (unit, labels, point.count) == ("s", {TASK: "train"}, 2)
    assert 0 <= point.min <= point.max < 60


@pytest.mark.parametrize(
    ("counts", "recorded"),
    [
        ({3: 1, 5: 1}, {3: 1, 5: 1}),
        # Of 4,000 samples, about 32 are recorded in proportion, at least one per staleness.
        ({3: 1000, 5: 2999, 2: 1}, {3: 8, 5: 24, 2: 1}),
    ],
)
def test_staleness_is_the_difference_of_versions(client, metrics, counts, recorded):
    size = sum(counts.values())
    for version, number in counts.items():
        with step_context("run", version, version):
            ids = [f"{version}-{i}" for i in range(number)]
            client.put_samples(ids, "train_7", batch(number))
    claimed = client.claim_meta("train_7", "train", ["x"], size, blocking=False)
    with step_context("run", 6, 6):
        record_trained(client, claimed, field="x")
    unit, [(labels, point)] = metrics.read()["rl.staleness"]
    assert (unit, labels) == ("{version}", {TASK: "train"})
    assert point.count == sum(recorded.values())
    assert point.sum == sum((6 - version) * number for version, number in recorded.items())
    assert (point.min, point.max) == (6 - max(counts), 6 - min(counts))


def test_an_error_of_an_adapter_does_not_fail_the_training_step(client, metrics):
    class FailingStore(InMemoryDataPlaneClient):
        def read_origins(self, *args):
            raise RuntimeError("a bug in an adapter")

    client.put_samples(["a"], "train_7", batch(1))
    claimed = client.claim_meta("train_7", "train", ["x"], 1)
    with FailingStore() as store, step_context("run", 6, 6), capture_logs() as logs:
        record_trained(store, claimed, field="x")
    assert [line["event"] for line in logs] == ["staleness_not_recorded"]
    assert metrics.points("rl.staleness") == []


def test_labels_of_partitions_are_bounded(client, metrics):
    names = [f"step_{number}" for number in range(100)]
    names += ["7f3e9a2c-11d2-4a4e-9a1b-0123456789ab/train", "é" * 500, "\x00", " "]
    names += [f"{chr(97 + i % 26)}{chr(97 + i // 26)}z" for i in range(200)]
    for name in [*names, "step_5"]:
        client.register_partition(name, ["x"], 1, [])
    points = metrics.points("messaging.client.operation.duration")
    classes = {labels[PARTITION] for labels, _ in points}
    assert len(classes) == MAX_LABELS + 1
    assert classes >= {"train_#", "step_#", "#/train", "other"}
    assert max(map(len, classes)) == 64


def test_values_of_all_clients_of_a_process_are_summed(client, metrics):
    client.put_samples(["a", "b"], "train_7", batch(2))
    with InstrumentedDataPlaneClient(InMemoryDataPlaneClient()) as second:
        second.register_partition("val", ["x"], 4, ["judge"])
        second.register_partition("train_8", ["x"], 4, ["judge"])
        second.put_samples(["a", "b", "c"], "val", batch(3))
        second.put_samples(["a"], "train_8", batch(1))
        second.claim_meta("val", "judge", ["x"], 2, blocking=False)
        assert metrics.values("dataplane.outstanding") == {"train_#": 16 + 8, "val": 24}
        assert metrics.states("judge") == (1, 2)


@pytest.mark.parametrize("attached", [False, True])
def test_samples_of_a_store_with_several_clients_count_once(metrics, attached):
    store = InMemoryDataPlaneClient()
    clients = [client_with_claim(store)]
    for _ in range(2):
        inner = InMemoryDataPlaneClient(bootstrap=False) if attached else store
        clients.append(InstrumentedDataPlaneClient(inner))
        clients[-1].claim_meta("train_7", "train", ["x"], 1, blocking=False)
    assert metrics.states() == (1, 3)
    store.close()


def test_partitions_of_one_name_in_two_stores_are_summed(metrics):
    with (
        client_with_claim(InMemoryDataPlaneClient()),
        client_with_claim(InMemoryDataPlaneClient(), samples=3),
    ):
        assert metrics.states() == (3 + 2, 2)


class QueryRecorder(InMemoryDataPlaneClient):
    """Store that records its queries, and raises ``error`` if it is set."""

    def __init__(self):
        super().__init__()
        self.queries = []
        self.error = None

    @property
    def inspector(self):
        inspector = super().inspector
        inspector.count_samples, inspector.list_storage = self._count, self._list_storage
        return inspector

    def _count(self, partition_id, *more):
        self.queries.append(partition_id)
        if self.error is not None:
            raise self.error
        return super().inspector.count_samples(partition_id, *more)

    def _list_storage(self):
        if isinstance(self.error, RuntimeError):
            raise self.error
        return super().inspector.list_storage()


def test_each_task_is_queried_once_per_collection(metrics):
    store = QueryRecorder()
    clients = [client_with_claim(store)]
    for _ in range(2):  # one of them wrapped again
        clients.append(InstrumentedDataPlaneClient(clients[-1]))
        clients[-1].claim_meta("train_7", "train", ["x"], 1, blocking=False)
    assert metrics.states() == (1, 3)
    assert store.queries == ["train_7"]
    clients[0].put_samples(["more"], "train_7", batch(1))
    assert metrics.states() == (2, 3)
    clients[0].clear_samples(None, "train_7")
    store.queries.clear()
    for _ in range(2):  # a task of a cleared partition is not queried again
        assert metrics.points("dataplane.ready") == metrics.points("dataplane.acknowledged") == []
    assert len(store.queries) <= len(clients)
    store.close()


def test_a_store_that_cannot_be_inspected_can_be_wrapped(metrics):
    store = QueryRecorder()
    store.error = RuntimeError("a bug in an adapter")
    with client_with_claim(store):
        assert metrics.values("dataplane.outstanding") == {"train_#": 32}


def test_a_failing_store_loses_only_its_own_series(metrics):
    class StoreWithUnit(QueryRecorder):
        def _list_storage(self):
            super()._list_storage()
            return [StorageSummary(name="u0", node="n", capacity=1, used=1, free=0)]

    failing_store = StoreWithUnit()
    with (
        client_with_claim(InMemoryDataPlaneClient()),
        client_with_claim(failing_store, partition="val_1") as other,
        capture_logs() as logs,
    ):
        failing_store.error = RuntimeError("a bug in an adapter")
        for _ in range(2):
            for name in ("dataplane.ready", "dataplane.acknowledged", "dataplane.outstanding"):
                assert metrics.values(name).keys() == {"train_#"}
            other.claim_meta("val_1", "train", ["x"], 1, blocking=False)
    assert [line["event"] for line in logs] == ["store_not_counted"]


@pytest.mark.parametrize("error", [UnavailableError("away"), DeadlineExceededError("late")])
def test_an_unreachable_store_is_queried_once_per_collection(metrics, error):
    store = QueryRecorder()
    with (
        client_with_claim(store, partition="train_1"),
        client_with_claim(store, partition="val") as client,
    ):
        client.register_partition("last", ["x"], 1, ["train"])
        client.put_samples(["a"], "last", batch(1))
        client.claim_meta("last", "train", ["x"], 1)
        store.queries.clear()
        store.error = error
        with client_with_claim(InMemoryDataPlaneClient(), partition="other"):
            assert metrics.values("dataplane.ready").keys() == {"other"}
        assert len(store.queries) == 1
        store.error = None
        assert metrics.values("dataplane.ready").keys() == {"train_#", "val", "last"}


def test_only_the_last_claiming_tasks_are_counted(metrics):
    store = QueryRecorder()
    with client_with_claim(store, partition="first") as client:

        def claim(partition):
            client.register_partition(partition, ["x"], 1, ["train"])
            client.claim_meta(partition, "train", ["x"], 1, blocking=False)

        for number in range(MAX_WATCHED - 1):
            claim(f"p{number}")
        claim("first")
        claim("last")  # instead of p0
        metrics.read()
        assert set(store.queries) == {
            "first",
            "last",
            *(f"p{n}" for n in range(1, MAX_WATCHED - 1)),
        }


def test_bytes_of_equal_units_are_added_per_store(metrics):
    class StoreWithUnit(InMemoryDataPlaneClient):
        used = 300

        @property
        def inspector(self):
            inspector = super().inspector
            unit = StorageSummary(name="u0", node="n", capacity=999, used=self.used, free=1)
            inspector.list_storage = lambda: [unit]
            return inspector

    store, other = StoreWithUnit(), StoreWithUnit()
    other.used = 4
    clients = [InstrumentedDataPlaneClient(each) for each in (store, store, other)]
    assert metrics.values("dataplane.outstanding", "dataplane.unit") == {"u0": 304}
    for client in clients:
        client.close()


@pytest.mark.parametrize("end", ["closed", "garbage collected"])
def test_closed_client_reports_nothing(metrics, end):
    store = InMemoryDataPlaneClient()
    client = client_with_claim(store)
    assert metrics.values("dataplane.outstanding") == {"train_#": 32}
    if end == "closed":
        client.close()
        assert metrics.points("messaging.client.operation.duration")
    del client
    gc.collect()
    assert metrics.points("dataplane.outstanding") == []
    assert metrics.points("dataplane.ready") == []
    with client_with_claim(InMemoryDataPlaneClient(), samples=1):
        assert metrics.values("dataplane.outstanding") == {"train_#": 8}
    store.close()


def test_clients_count_before_setup_but_not_in_a_forked_child():
    result = run_script(
        """
import urllib.request
from dataplane_core import InMemoryDataPlaneClient
from observability import InstrumentedDataPlaneClient

def client(partition):
    client = InstrumentedDataPlaneClient(InMemoryDataPlaneClient())
    client.register_partition(partition, ["x"], 1, [])
    client.put_samples(["a"], partition, tags=[{}])
    return client

def outstanding(telemetry):
    page = urllib.request.urlopen("http://%s:%d" % telemetry.prometheus_address).read().decode()
    lines = [line for line in page.splitlines() if line.startswith("dataplane_outstanding")]
    return sorted(line.partition('"')[2].partition('"')[0] for line in lines)

before = client("before")
telemetry = setup("parent", prometheus_port=0)
after = client("after")
report(clients=outstanding(telemetry))
if (child := os.fork()) == 0:
    telemetry = setup("child", prometheus_port=0)
    own_client = client("child")
    report(clients=outstanding(telemetry))
    os._exit(0)
os.waitpid(child, 0)
"""
    )
    assert result.reports == [{"clients": ["after", "before"]}, {"clients": ["child"]}]
