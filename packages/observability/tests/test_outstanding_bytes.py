"""What was put and not cleared is counted once per (sample, field), whatever the order of calls."""

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

ZERO = {
    "total_ops": 0,
    "total_bytes": 0,
    "total_keys": 0,
    "bytes_outstanding": 0,
    "peak_bytes_outstanding": 0,
    "n_keys_outstanding": 0,
    "max_bytes_per_key_seen": 0,
    "last_put_bytes_per_key": 0,
}


@pytest.fixture
def client():
    with MetricsDataPlaneClient(InMemoryDataPlaneClient()) as client:
        client.register_partition("train", ["x"], 8, ["logprob"])
        client.register_partition("val", ["x"], 8, [])
        yield client


def put(client, ids, partition="train", **lengths):
    """Put int8 rows: each field is given the row lengths of its samples."""
    client.put_samples(list(ids), partition, int8_rows(len(ids), **lengths))


def int8_rows(count, **lengths):
    fields = {}
    for name, row_lengths in lengths.items():
        offsets = torch.tensor([0, *torch.tensor(row_lengths).cumsum(0)])
        values = torch.zeros(sum(row_lengths), dtype=torch.int8)
        fields[name] = torch.nested.nested_tensor_from_jagged(values, offsets)
    return TensorDict(fields, batch_size=[count])


def held(client):
    snapshot = client.snapshot()
    return snapshot["bytes_outstanding"], snapshot["n_keys_outstanding"]


def test_a_new_wrapper_has_counted_nothing():
    assert MetricsDataPlaneClient(InMemoryDataPlaneClient()).snapshot() == ZERO


def test_totals_are_sums_over_calls_that_succeeded(client):
    put(client, "ab", x=[3, 5])
    client.get_samples(["a"], "train", ["x"])
    with pytest.raises(KeyError):
        client.get_samples(["z"], "train", ["x"])
    totals = client.snapshot()
    assert totals["total_ops"] == 4
    assert totals["total_bytes"] == 8 + 3
    assert totals["total_keys"] == 8 + 8 + 2 + 1


def test_the_same_put_made_twice_counts_once(client):
    put(client, "abc", x=[5, 5, 1])
    once = client.snapshot()
    put(client, "abc", x=[5, 5, 1])
    twice = client.snapshot()
    assert held(client) == (11, 3)
    assert {k for k in once if once[k] != twice[k]} == {"total_ops", "total_bytes", "total_keys"}


def test_an_overwritten_field_counts_with_its_last_size(client):
    put(client, "a", x=[9])
    put(client, "a", x=[4])
    assert held(client) == (4, 1)
    put(client, "a", y=[2])
    assert held(client) == (6, 1)
    assert client.snapshot()["peak_bytes_outstanding"] == 9


def test_bytes_are_spread_over_the_ids_and_the_first_get_the_remainder(client):
    put(client, "abc", x=[0, 0, 11])
    left = []
    for sample_id in "abc":
        client.clear_samples([sample_id], "train")
        left.append(held(client)[0])
    assert left == [7, 3, 0]


def test_remainders_of_several_fields_do_not_pile_up_on_the_first_id(client):
    put(client, "abc", x=[4, 0, 0], y=[4, 0, 0], z=[0, 0, 5])
    left = []
    for sample_id in "abc":
        client.clear_samples([sample_id], "train")
        left.append(held(client)[0])
    assert left == [8, 4, 0]


def test_clearing_takes_off_what_the_ids_hold_and_ignores_unknown_ones(client):
    put(client, "ab", x=[2, 2])
    client.clear_samples(["a", "a", "unknown"], "train")
    assert held(client) == (2, 1)
    client.clear_samples(["b"], "val")
    client.clear_samples(["b"], "nowhere")
    assert held(client) == (2, 1)


def test_clearing_a_partition_leaves_the_others(client):
    put(client, "ab", x=[2, 2])
    put(client, "ab", "val", x=[3, 3])
    client.clear_samples(None, "train")
    assert held(client) == (6, 2)


def test_samples_without_tensors_count_as_keys(client):
    client.put_samples(["a", "b"], "train", tags=[{}, {}])
    assert held(client) == (0, 2)


def test_failed_calls_change_nothing(client):
    put(client, "ab", x=[2, 2])
    before = client.snapshot()
    with pytest.raises(ValueError, match="more than once"):
        put(client, "cc", x=[9, 9])
    with pytest.raises(ValueError, match="not registered"):
        put(client, "a", "nowhere", x=[9])
    with pytest.raises(ValueError, match="cannot take"):
        client.put_samples(["a"], "train", TensorDict({"x": torch.zeros(1, 3)}, [1]))
    with pytest.raises(TimeoutError):
        client.claim_meta("train", "logprob", ["x"], 3, timeout_s=0.01)
    assert client.snapshot() == before


def test_a_refused_clear_changes_nothing_and_a_forced_one_does():
    leased = {"enabled": True, "impl": "in_memory", "claim_lease_s": 1000.0}
    with MetricsDataPlaneClient(InMemoryDataPlaneClient(leased)) as client:
        client.register_partition("train", ["x"], 1, ["logprob"])
        put(client, "a", x=[3])
        client.claim_meta("train", "logprob", ["x"], 1)
        for asked in (["a"], None):
            with pytest.raises(RuntimeError, match="leased by 'logprob'"):
                client.clear_samples(asked, "train")
        assert held(client) == (3, 1)
        client.clear_samples(["a"], "train", force=True)
        assert held(client) == (0, 0)


def test_bytes_per_key_are_of_the_largest_sample_and_of_the_last_put(client):
    put(client, "ab", x=[8, 8])
    put(client, "a", y=[5])
    put(client, "bc", x=[1, 2])
    client.put_samples([], "train")
    snapshot = client.snapshot()
    assert snapshot["max_bytes_per_key_seen"] == 13
    assert snapshot["last_put_bytes_per_key"] == 1


def test_no_tensor_is_kept_alive():
    class Forgetful(InMemoryDataPlaneClient):
        def put_samples(self, sample_ids, partition_id, fields=None, tags=None):
            return None

    client = MetricsDataPlaneClient(Forgetful())
    tensor = torch.zeros(2, 3)
    alive = weakref.ref(tensor)
    client.put_samples(["a", "b"], "train", TensorDict({"x": tensor}, [2]))
    del tensor
    gc.collect()
    assert alive() is None
    assert held(client) == (24, 2)


def test_a_sample_cleared_before_its_put_has_returned_is_not_counted_for_ever():
    class FastConsumer(InMemoryDataPlaneClient):
        """Each sample is claimed and cleared by others before the put's caller goes on."""

        cleared = None

        def put_samples(self, *args, **kwargs):
            meta = super().put_samples(*args, **kwargs)
            with ThreadPoolExecutor(1) as consumer:
                consumer.submit(client.clear_samples, self.cleared, "train").result(10)
            return meta

    for cleared, left in ((["a"], (4, 1)), (["a", "b"], (0, 0)), (None, (0, 0))):
        inner = FastConsumer()
        client = MetricsDataPlaneClient(inner)
        client.register_partition("train", ["x"], 2, [])
        inner.cleared = cleared
        put(client, "ab", x=[4, 4])
        assert held(client) == left
        assert client.snapshot()["peak_bytes_outstanding"] == 8


def test_counting_from_many_threads_loses_nothing(client):
    threads = 8
    together = threading.Barrier(threads)

    def work(number):
        together.wait(10)
        for step in range(30):
            ids = [f"{number}-{step}-{i}" for i in range(3)]
            client.put_samples(ids, "train", int8_rows(3, x=[2, 2, 2]))
            client.clear_samples(ids[:2], "train")

    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(work, number) for number in range(threads)]:
            done.result(60)
    snapshot = client.snapshot()
    assert held(client) == (threads * 30 * 2, threads * 30)
    assert snapshot["total_ops"] == 2 + threads * 30 * 2
    assert snapshot["total_bytes"] == threads * 30 * 6


IDS = ["a", "b", "c", "d", "e"]
PARTITIONS = ["train", "val"]
some_ids = st.lists(st.sampled_from(IDS), max_size=4, unique=True)


@st.composite
def puts(draw):
    ids = draw(some_ids)
    names = draw(st.lists(st.sampled_from(["x", "y", "z"]), unique=True)) if ids else []
    fields = {name: [draw(st.integers(0, 7)) for _ in ids] for name in names}
    return ("put", draw(st.sampled_from(PARTITIONS)), ids, fields)


clears = st.tuples(
    st.just("clear"), st.sampled_from(PARTITIONS), st.one_of(st.none(), some_ids), st.just({})
)
fails = st.tuples(st.just("fail"), st.sampled_from(PARTITIONS), some_ids, st.just({}))


class Model:
    """Every outstanding byte by itself: whose it is, and of which field."""

    def __init__(self):
        self.owned = []
        self.keys = set()
        self.peak = self.most = self.last = 0

    def put(self, partition, ids, fields):
        written = {(partition, i, name) for i in ids for name in fields}
        self.owned = [cell for cell in self.owned if cell not in written]
        self.keys |= {(partition, i) for i in ids}
        names = [name for name, lengths in fields.items() for _ in range(sum(lengths))]
        whole, left = [], []
        for name in fields:
            of_field = [n for n in names if n == name]
            even = len(of_field) // len(ids) * len(ids)
            whole += of_field[:even]
            left += of_field[even:]
        for dealt in (whole, left):
            for turn, name in enumerate(dealt):
                self.owned.append((partition, ids[turn % len(ids)], name))
        self.peak = max(self.peak, len(self.owned))
        self.most = max([self.most, *(self.of(*key) for key in self.keys)])
        if ids:
            self.last = len(names) // len(ids)

    def of(self, partition, sample_id):
        return sum(cell[:2] == (partition, sample_id) for cell in self.owned)

    def clear(self, partition, ids):
        def gone(key):
            return key[0] == partition and (ids is None or key[1] in ids)

        self.owned = [cell for cell in self.owned if not gone(cell)]
        self.keys = {key for key in self.keys if not gone(key)}


@given(st.lists(st.one_of(puts(), puts(), clears, fails), max_size=15))
@settings(max_examples=150)
@pytest.mark.filterwarnings("ignore:clear_samples:RuntimeWarning")
def test_any_sequence_of_calls_agrees_with_counting_every_byte(calls):
    model = Model()
    with MetricsDataPlaneClient(InMemoryDataPlaneClient()) as client:
        for op, partition, ids, fields in calls:
            client.register_partition(partition, [], 8, [])
            if op == "put":
                client.put_samples(ids, partition, int8_rows(len(ids), **fields))
                model.put(partition, ids, fields)
            elif op == "clear":
                client.clear_samples(ids, partition)
                model.clear(partition, ids)
            else:
                with pytest.raises(ValueError, match="more than once"):
                    client.put_samples([*ids, "a", "a"], partition)
            snapshot = client.snapshot()
            assert held(client) == (len(model.owned), len(model.keys))
            assert snapshot["peak_bytes_outstanding"] == model.peak
            assert snapshot["max_bytes_per_key_seen"] == model.most
            assert snapshot["last_put_bytes_per_key"] == model.last
