"""What a worker cannot hand over is an error of the loop, never a loop that waits for ever."""

from __future__ import annotations

import functools

import pytest
import torch
from remote_store import Remote, serving
from streaming_parts import counts, ids, leased, store
from tensordict import TensorDict
from worker_parts import Failing, stuck, summed, unpicklable

from dataplane_core import (
    DataPlaneError,
    DeadlineExceededError,
    InvalidRequestError,
    KVBatchMeta,
)
from dataplane_core.streaming import StreamingDataLoader, StreamingDataset
from dataplane_core.streaming_feed import Delivered

pytestmark = pytest.mark.slow


@pytest.fixture
def served():
    client = store(8, claim_lease_s=60.0)
    with serving(client) as address:
        yield client, functools.partial(Remote, address)


def loader(make_client, *, timeout_s=30.0, kind=StreamingDataset, **more):
    dataset = kind(make_client, "p", "a", required_fields=["x"], batch_size=4, timeout_s=timeout_s)
    return StreamingDataLoader(dataset, num_workers=1, **more)


def test_a_batch_that_cannot_be_pickled_is_said_and_given_back(served):
    client, make_client = served
    with (
        loader(make_client, collate=unpicklable) as found,
        pytest.raises(InvalidRequestError, match="4 samples, a function, cannot be pickled"),
    ):
        list(found)
    assert counts(client) == (8, 0, 0)


def test_an_error_that_cannot_be_pickled_is_said_in_words(served):
    _, make_client = served
    with (
        loader(make_client, kind=Failing) as found,
        pytest.raises(DataPlaneError, match="Local: the store's own reason"),
    ):
        list(found)


def test_a_worker_that_is_stuck_ends_the_loop_at_its_deadline(served):
    _, make_client = served
    with (
        loader(make_client, collate=stuck, timeout_s=2.0, batch_timeout_s=3.0) as found,
        pytest.raises(DeadlineExceededError, match="batch_timeout_s=3"),
    ):
        list(found)


def test_tensors_of_all_workers_arrive_whatever_the_order_in_which_they_end(served):
    client, make_client = served
    dataset = StreamingDataset(
        make_client, "p", "a", required_fields=["x"], batch_size=1, timeout_s=30.0
    )
    with StreamingDataLoader(dataset, num_workers=2, collate=summed) as found:
        got = [(float(value), *ids) for value, ids in found]
    assert sorted(got) == [(float(i), f"s{i:02d}") for i in range(8)]
    assert counts(client) == (0, 0, 8)


@pytest.mark.parametrize("settle", ["next", "commit"])
def test_prefetching_loader_delivers_what_a_crashed_consumer_held(served, settle):
    client, make_client = served
    leased(2.0)().claim_meta("p", "a", ["x"], 3)
    dataset = StreamingDataset(
        make_client, "p", "a", required_fields=["x"], batch_size=1, timeout_s=30.0
    )
    with StreamingDataLoader(dataset, num_workers=1, settle=settle) as found:
        got = ids(found)
        if settle == "commit":
            assert not client.check_consumption_status("p", ["a"])
            found.state_dict()
            found.commit()
    assert sorted(got) == [f"s{i:02d}" for i in range(8)]
    assert client.check_consumption_status("p", ["a"])


@pytest.fixture
def is_pinned(monkeypatch):
    """Whether a tensor's memory is pinned; without a GPU, whether torch was told to pin it."""
    if torch.cuda.is_available():
        return torch.Tensor.is_pinned
    pinned = []

    def pin(tensor, *device):
        pinned.append(tensor.clone())
        return pinned[-1]

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    return lambda tensor: any(tensor.data_ptr() == one.data_ptr() for one in pinned)


def test_a_batch_is_pinned_as_it_is_and_as_it_was_collated(is_pinned):
    meta = KVBatchMeta(partition_id="p", task_name="a", sample_ids=["s00"])
    batch = TensorDict({"x": torch.ones(1)}, [1])
    plain = Delivered((batch, meta), meta).pin_memory()
    own = Delivered({"x": torch.ones(1)}, meta).pin_memory()
    assert is_pinned(plain.content[0]["x"])
    assert plain.content[1] is meta
    assert is_pinned(own.content["x"])
    assert not is_pinned(batch["x"])
