"""The contract on a store with get, set, delete and scan in transactions."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest
import torch
from tensordict import NonTensorData, TensorDict

from dataplane_core import errors
from dataplane_core.key_value import KeyValueClient
from dataplane_core.testing import DataPlaneClientContract


class DictStore:
    """Store of several clients. A transaction works on a copy, which replaces the content."""

    def __init__(self):
        self.values = {}
        self.lock = threading.Lock()


class DictTransaction:
    def __init__(self, values):
        self.values = values
        self.get = values.get
        self.set = values.__setitem__

    def delete(self, key):
        self.values.pop(key, None)

    def scan(self, prefix):
        # In reverse, because `scan` promises no order.
        return (
            (key, self.values[key])
            for key in sorted(self.values, reverse=True)
            if key.startswith(prefix)
        )


class DictClient(KeyValueClient):
    def __init__(self, store):
        self.store = store
        self.closed = False

    @contextmanager
    def transaction(self):
        if self.closed:
            raise errors.ClosedError("closed")
        with self.store.lock:
            values = dict(self.store.values)
            yield DictTransaction(values)
            self.store.values = values

    def close(self):
        self.closed = True


@pytest.fixture
def store():
    return DictStore()


@pytest.fixture
def client(store):
    with DictClient(store) as client:
        yield client


class TestKeyValueClient(DataPlaneClientContract):
    walk_examples = 20

    @pytest.fixture
    def client(self, client):
        return client

    @pytest.fixture
    def peer(self, store, client):
        with DictClient(store) as peer:
            yield peer


def row(value):
    return TensorDict({"x": torch.tensor([value])}, batch_size=[1])


HOSTILE = ['a", "b', "a", 'a"', "a\\", "[", "ä\n\0", "😀", "sample", '", "x']


def test_similar_names_do_not_collide(client):
    for partition in HOSTILE:
        client.register_partition(partition, ["x"], len(HOSTILE), ["t", 't", "u'])
        for number, sample_id in enumerate(HOSTILE):
            client.put_samples([sample_id], partition, row(number))
    client.clear_samples(["a"], "a")
    client.clear_samples(None, HOSTILE[0])
    for partition in HOSTILE[1:]:
        kept = [each for each in HOSTILE if (partition, each) != ("a", "a")]
        taken = client.claim_meta(partition, "t", ["x"], 100)
        assert taken.sample_ids == kept
        values = client.get_data(taken)["x"].tolist()
        assert values == [HOSTILE.index(each) for each in kept]
        assert client.claim_meta(partition, 't", "u', ["x"], 100).sample_ids == kept


def test_put_with_one_invalid_value_stores_nothing(client, store):
    client.register_partition("p", ["x", "text"], 2, ["t"])
    before = dict(store.values)
    values = TensorDict({"text": NonTensorData(["fine", object()])}, batch_size=[2])
    with pytest.raises(errors.InvalidRequestError, match="'text'"):
        client.put_samples(["a", "b"], "p", values)
    assert store.values == before


def test_field_can_change_kind_once_no_sample_has_it(client):
    client.register_partition("p", ["x"], 2, ["t"])
    client.put_samples(["a"], "p", row(1))
    client.put_samples(["a"], "p", row(2))
    with pytest.raises(errors.SchemaMismatchError):
        client.put_samples(["b"], "p", row(0.5))
    client.clear_samples(["a"], "p")
    client.put_samples(["b"], "p", row(0.5))
    assert client.get_samples(["b"], "p", ["x"])["x"].tolist() == [0.5]


@pytest.mark.parametrize("keywords", [{"dp_world": 2, "dp_rank": 0}, {"seed": 1}])
def test_unsupported_keywords_are_named(client, keywords):
    client.register_partition("p", ["x"], 1, ["t"])
    with pytest.raises(errors.UnsupportedError, match=next(iter(keywords))):
        client.claim_meta("p", "t", ["x"], 1, **keywords)


def test_a_cleared_partition_leaves_no_key(client, store):
    client.register_partition("p", ["x"], 1, ["t"])
    client.put_samples(["a"], "p", row(1))
    client.claim_meta("p", "t", ["x"], 1)
    client.clear_samples(None, "p")
    assert store.values == {}
