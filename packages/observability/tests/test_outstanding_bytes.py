"""A field of a sample counts once from its put to its clear, in any order of calls."""

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from dataplane_core import InMemoryDataPlaneClient
from observability import MetricsDataPlaneClient

MAX_SAMPLES = 262_144
"""Maximum number of counted samples; see docs/observability.md."""


@pytest.fixture
def client():
    with MetricsDataPlaneClient(InMemoryDataPlaneClient()) as client:
        client.register_partition("train", ["x"], 8, ["logprob"])
        yield client


def int8_rows(count, **lengths):
    """Return rows of bytes with the given lengths, by field."""
    fields = {}
    for name, row_lengths in lengths.items():
        offsets = torch.tensor([0, *torch.tensor(row_lengths).cumsum(0)])
        values = torch.zeros(sum(row_lengths), dtype=torch.int8)
        fields[name] = torch.nested.nested_tensor_from_jagged(values, offsets)
    return TensorDict(fields, batch_size=[count])


def put(client, ids, partition="train", **lengths):
    client.put_samples(list(ids), partition, int8_rows(len(ids), **lengths))


def outstanding(client):
    snapshot = client.snapshot()
    return snapshot["bytes_outstanding"], snapshot["n_keys_outstanding"]


def test_failed_calls_change_nothing(client):
    put(client, "ab", x=[2, 2])
    before = client.snapshot()
    with pytest.raises(ValueError, match="not registered"):
        put(client, "a", "nowhere", x=[9])
    with pytest.raises(ValueError, match="cannot take"):
        client.put_samples(["a"], "train", TensorDict({"x": torch.zeros(1, 3)}, [1]))
    with pytest.raises(TimeoutError):
        client.claim_meta("train", "logprob", ["x"], 3, timeout_s=0.01)
    with pytest.raises(KeyError):
        client.get_samples(["z"], "train", ["x"])
    assert client.snapshot() == before


def test_a_refused_clear_changes_nothing_but_a_forced_one_does():
    leased = {"enabled": True, "impl": "in_memory", "claim_lease_s": 1000.0}
    with MetricsDataPlaneClient(InMemoryDataPlaneClient(leased)) as client:
        client.register_partition("train", ["x"], 1, ["logprob"])
        put(client, "a", x=[3])
        client.claim_meta("train", "logprob", ["x"], 1)
        for ids in (["a"], None):
            with pytest.raises(RuntimeError, match="leased by 'logprob'"):
                client.clear_samples(ids, "train")
        assert outstanding(client) == (3, 1)
        client.clear_samples(["a"], "train", force=True)
        assert outstanding(client) == (0, 0)


class DiscardingStore(InMemoryDataPlaneClient):
    """Store that retains nothing."""

    def put_samples(self, sample_ids, partition_id, fields=None, tags=None):
        return None


def test_no_reference_to_a_tensor_is_held():
    client = MetricsDataPlaneClient(DiscardingStore())
    tensor = torch.zeros(2, 3)
    alive = weakref.ref(tensor)
    client.put_samples(["a", "b"], "train", TensorDict({"x": tensor}, [2]))
    del tensor
    gc.collect()
    assert alive() is None
    assert outstanding(client) == (24, 2)


def test_samples_beyond_the_maximum_are_dropped_oldest_first():
    client = MetricsDataPlaneClient(DiscardingStore())
    for partition in ("old", "new"):
        ids = [f"{partition}{number}" for number in range(150_000)]
        client.put_samples(ids, partition, TensorDict({"x": torch.zeros(len(ids))}, [len(ids)]))
    assert outstanding(client) == (4 * MAX_SAMPLES, MAX_SAMPLES)
    assert client.outstanding_by_partition() == {
        "old": 4 * (MAX_SAMPLES - 150_000),
        "new": 4 * 150_000,
    }


@pytest.mark.parametrize(
    ("cleared", "remaining"), [(["a"], (4, 1)), (["a", "b"], (0, 0)), (None, (0, 0))]
)
def test_a_sample_cleared_before_its_put_returns_is_not_counted(cleared, remaining):
    class FastConsumer(InMemoryDataPlaneClient):
        """Store whose samples another client clears before their put returns."""

        def put_samples(self, *args, **kwargs):
            meta = super().put_samples(*args, **kwargs)
            with ThreadPoolExecutor(1) as consumer:
                consumer.submit(client.clear_samples, cleared, "train").result(10)
            return meta

    client = MetricsDataPlaneClient(FastConsumer())
    client.register_partition("train", ["x"], 2, [])
    put(client, "ab", x=[4, 4])
    assert outstanding(client) == remaining
    assert client.snapshot()["peak_bytes_outstanding"] == 8


def test_counting_from_many_threads_loses_nothing(client):
    threads = 8
    barrier = threading.Barrier(threads)

    def work(number):
        barrier.wait(10)
        for step in range(30):
            ids = [f"{number}-{step}-{i}" for i in range(3)]
            put(client, ids, x=[2, 2, 2])
            client.clear_samples(ids[:2], "train")

    with ThreadPoolExecutor(threads) as pool:
        for future in [pool.submit(work, number) for number in range(threads)]:
            future.result(60)
    snapshot = client.snapshot()
    assert outstanding(client) == (threads * 30 * 2, threads * 30)
    assert snapshot["total_ops"] == 1 + threads * 30 * 2
    assert snapshot["total_bytes"] == threads * 30 * 6


PARTITIONS = st.sampled_from(["train", "val"])
SAMPLE_IDS = st.lists(st.sampled_from(["a", "b", "c", "d", "e"]), max_size=4, unique=True)


@st.composite
def puts(draw):
    ids = draw(SAMPLE_IDS)
    names = draw(st.lists(st.sampled_from(["x", "y", "z"]), unique=True)) if ids else []
    fields = {name: [draw(st.integers(0, 7)) for _ in ids] for name in names}
    return ("put", draw(PARTITIONS), ids, fields)


CLEARS = st.tuples(st.just("clear"), PARTITIONS, st.none() | SAMPLE_IDS, st.just({}))
FAILS = st.tuples(st.just("fail"), PARTITIONS, SAMPLE_IDS, st.just({}))


class Model:
    """Model that has every outstanding byte, with its sample and field."""

    def __init__(self):
        self.owned = []  # (partition, sample, field) of each byte
        self.keys = set()
        self.totals = dict.fromkeys(MetricsDataPlaneClient(DiscardingStore()).snapshot(), 0)

    def count(self, n_keys, n_bytes=0):
        self.totals["total_ops"] += 1
        self.totals["total_keys"] += n_keys
        self.totals["total_bytes"] += n_bytes

    def put(self, partition, ids, fields):
        written = {(partition, i, name) for i in ids for name in fields}
        self.owned = [byte for byte in self.owned if byte not in written]
        self.keys |= {(partition, i) for i in ids}
        even_bytes, remaining_bytes = [], []  # the name of the field of each byte
        for name, lengths in fields.items():
            even = sum(lengths) // len(ids) * len(ids)
            even_bytes += [name] * even
            remaining_bytes += [name] * (sum(lengths) - even)
        for names in (even_bytes, remaining_bytes):
            self.owned += [
                (partition, ids[number % len(ids)], name) for number, name in enumerate(names)
            ]
        n_bytes = len(even_bytes) + len(remaining_bytes)
        self.count(len(ids), n_bytes)
        if ids:
            self.totals["last_put_bytes_per_key"] = n_bytes // len(ids)

    def clear(self, partition, ids):
        self.count(len(ids or ()))
        cleared = {k for k in self.keys if k[0] == partition and (ids is None or k[1] in ids)}
        self.keys -= cleared
        self.owned = [byte for byte in self.owned if byte[:2] not in cleared]

    def snapshot(self):
        self.totals["bytes_outstanding"] = len(self.owned)
        self.totals["n_keys_outstanding"] = len(self.keys)
        for name, now in (
            ("peak_bytes_outstanding", len(self.owned)),
            ("max_bytes_per_key_seen", max(map(self.bytes_of, self.keys), default=0)),
        ):
            self.totals[name] = max(self.totals[name], now)
        return self.totals

    def bytes_of(self, key):
        return sum(byte[: len(key)] == key for byte in self.owned)

    def by_partition(self):
        return {partition: self.bytes_of((partition,)) for partition, _ in self.keys}


@given(st.lists(st.one_of(puts(), puts(), CLEARS, FAILS), max_size=15))
@settings(max_examples=150)
@pytest.mark.filterwarnings("ignore:clear_samples:RuntimeWarning")
def test_any_sequence_of_calls_agrees_with_counting_every_byte(calls):
    model = Model()
    with MetricsDataPlaneClient(InMemoryDataPlaneClient()) as client:
        for op, partition, ids, fields in calls:
            client.register_partition(partition, [], 8, [])
            model.count(8)
            if op == "put":
                put(client, ids, partition, **fields)
                model.put(partition, ids, fields)
            elif op == "clear":
                client.clear_samples(ids, partition)
                model.clear(partition, ids)
            else:
                with pytest.raises(ValueError, match="more than once"):
                    client.put_samples([*ids, "a", "a"], partition)
            assert client.snapshot() == model.snapshot()
            assert client.outstanding_by_partition() == model.by_partition()
