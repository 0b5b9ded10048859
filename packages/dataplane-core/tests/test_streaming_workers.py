"""A batch that a worker cannot deliver raises in the loop; the loop never hangs.

Imports internals: a test pins a worker's batch directly, because a loader pins nothing on a
machine without a GPU.
"""

from __future__ import annotations

import functools

import pytest
import torch
from remote_store import Remote, serving
from streaming_parts import commit_all, counts, dataset, ids, leased, store
from tensordict import TensorDict
from worker_parts import Failing, KilledInReport, stuck, summed, unpicklable

from dataplane_core import (
    DataPlaneError,
    DeadlineExceededError,
    InvalidRequestError,
    KVBatchMeta,
    StreamingDataLoader,
    StreamingDataset,
)
from dataplane_core.streaming.feed import DeliveredBatch
from dataplane_core.tensors.rows import form_of, is_form_known

pytestmark = pytest.mark.slow


@pytest.fixture
def served():
    client = store(8, claim_lease_s=60.0)
    with serving(client) as address:
        yield client, functools.partial(Remote, address)


def loader(make_client, *, timeout_s=30.0, kind=StreamingDataset, **more):
    data = dataset(make_client, timeout_s=timeout_s, kind=kind)
    return StreamingDataLoader(data, num_workers=1, **more)


def test_batch_that_cannot_be_pickled_raises_and_is_released(served):
    client, make_client = served
    with (
        loader(make_client, collate=unpicklable) as batches,
        pytest.raises(InvalidRequestError, match="4 samples, a function, cannot be pickled"),
    ):
        list(batches)
    assert counts(client) == (8, 0, 0)


def test_unpicklable_error_keeps_its_message(served):
    _, make_client = served
    with (
        loader(make_client, kind=Failing) as batches,
        pytest.raises(DataPlaneError, match="Local: the store's own reason"),
    ):
        list(batches)


def test_a_batch_of_a_worker_keeps_the_forms_of_its_fields(served):
    client, make_client = served
    nested = torch.nested.nested_tensor(list(torch.ones(8, 5)), layout=torch.jagged)
    names = sorted(client.claim_meta("p", "a", ["x"], 8).sample_ids)
    client.put_samples(names, "p", TensorDict({"tokens": nested}, [8]))
    client.register_partition("p", ["x", "tokens"], 8, ["b"])
    fields = ["x", "tokens"]
    data = StreamingDataset(make_client, "p", "b", required_fields=fields, batch_size=4)
    with StreamingDataLoader(data, num_workers=1) as batches:
        for delivered, meta in batches:
            assert {name: form_of(delivered[name]) for name in fields} == {
                "x": None,
                "tokens": "ragged",
            }
            assert is_form_known(delivered["x"])
            batches.ack(meta)


def test_worker_killed_while_it_reports_a_claim_ends_the_loop(served):
    _, make_client = served
    with (
        loader(make_client, kind=KilledInReport) as batches,
        pytest.raises(RuntimeError, match=r"DataLoader worker \(pid"),
    ):
        list(batches)


def test_stuck_worker_ends_the_loop_at_its_deadline(served):
    _, make_client = served
    with (
        loader(make_client, collate=stuck, timeout_s=2.0, batch_timeout_s=3.0) as batches,
        pytest.raises(DeadlineExceededError, match="batch_timeout_s=3"),
    ):
        list(batches)


def test_tensors_of_all_workers_arrive_in_any_order(served):
    client, make_client = served
    data = dataset(make_client, 1, timeout_s=30.0)
    with StreamingDataLoader(data, num_workers=2, collate=summed) as batches:
        got = [(float(value), *ids) for value, ids in batches]
    assert sorted(got) == [(float(i), f"s{i:02d}") for i in range(8)]
    assert counts(client) == (0, 0, 8)


@pytest.mark.parametrize("acknowledge_on", ["next", "commit"])
def test_prefetching_loader_delivers_a_crashed_consumers_claims(served, acknowledge_on):
    client, make_client = served
    leased(2.0)().claim_meta("p", "a", ["x"], 3)
    data = dataset(make_client, 1, timeout_s=30.0)
    with StreamingDataLoader(data, num_workers=1, acknowledge_on=acknowledge_on) as batches:
        got = ids(batches)
        if acknowledge_on == "commit":
            assert not client.check_consumption_status("p", ["a"])
            commit_all(batches)
    assert sorted(got) == [f"s{i:02d}" for i in range(8)]
    assert client.check_consumption_status("p", ["a"])


@pytest.fixture
def is_pinned(monkeypatch):
    """Return a check for pinned memory; without a GPU, whether torch was called to pin it."""
    if torch.cuda.is_available():
        return torch.Tensor.is_pinned
    pinned = []

    def pin(tensor, *device):
        pinned.append(tensor.clone())
        return pinned[-1]

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    return lambda tensor: any(tensor.data_ptr() == each.data_ptr() for each in pinned)


def test_plain_and_collated_batches_are_pinned(is_pinned):
    meta = KVBatchMeta(partition_id="p", task_name="a", sample_ids=["s00"])
    batch = TensorDict({"x": torch.ones(1)}, [1])
    plain = DeliveredBatch((batch, meta), meta).pin_memory()
    own = DeliveredBatch({"x": torch.ones(1)}, meta).pin_memory()
    assert is_pinned(plain.content[0]["x"])
    assert plain.content[1] is meta
    assert is_pinned(own.content["x"])
    assert not is_pinned(batch["x"])
