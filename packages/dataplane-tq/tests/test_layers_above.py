"""Layers of dataplane-core above the client, over TransferQueue."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from dataplane_core import (
    AsyncDataPlaneClient,
    InMemoryDataPlaneClient,
    StreamingDataLoader,
    StreamingDataset,
)
from dataplane_tq import TQDataPlaneClient

pytestmark = pytest.mark.slow

IDS = [f"s{i}" for i in range(20)]


@pytest.fixture
def partition(owner):
    owner.register_partition("train", ["ids"], len(IDS), ["train"])
    rows = [torch.arange(i) for i in range(len(IDS))]
    fields = TensorDict(
        {
            "ids": torch.nested.nested_tensor(rows, layout=torch.jagged),
            "text": NonTensorStack(*[{"i": i} for i in range(len(IDS))]),
        },
        batch_size=[len(IDS)],
    )
    owner.put_samples(IDS, "train", fields, [{"input_lengths": i} for i in range(len(IDS))])
    yield "train"
    owner.clear_samples(None, "train", force=True)


def test_saved_partition_is_restored_into_another_store(owner, partition, tmp_path):
    pytest.importorskip("safetensors", reason="needs the package safetensors")
    from dataplane_core import restore_partition, save_partition

    owner.claim_meta(partition, "train", ["ids"], 5)
    save_partition(owner, partition, tmp_path / "saved", batch=7)
    restore_partition(owner, tmp_path / "saved", "again")
    with InMemoryDataPlaneClient() as memory:
        restore_partition(memory, tmp_path / "saved")
        for client, name in ((owner, "again"), (memory, partition)):
            rows = client.get_samples(IDS, name, ["ids", "text"])
            assert [row.tolist() for row in rows["ids"].unbind()] == [
                list(range(i)) for i in range(len(IDS))
            ]
            assert rows.get("text").tolist() == [{"i": i} for i in range(len(IDS))]
            rest = client.claim_meta(name, "train", ["ids"], 100, timeout_s=30)
            assert rest.sample_ids == IDS[5:]
    owner.clear_samples(None, "again")


def test_rank_streams_a_partition_with_its_own_claims(owner, partition, config):
    leasing = {**config, "claim_lease_s": 60.0}
    dataset = StreamingDataset(
        partial(TQDataPlaneClient, leasing, bootstrap=False),
        partition,
        "train",
        required_fields=["ids"],
        batch_size=8,
        timeout_s=30.0,
    )
    seen = []
    with StreamingDataLoader(dataset) as loader:
        for batch, meta in loader:
            assert batch.batch_size == (meta.size,)
            seen += meta.sample_ids
    assert sorted(seen) == sorted(IDS)
    counts = owner.inspector.count_samples(partition, "train", ["ids"])
    assert (counts.acknowledged, counts.leased, counts.ready) == (len(IDS), 0, 0)


def test_coroutines_wait_for_claims_while_others_put(owner, config):
    async def scenario():
        client = TQDataPlaneClient(config, bootstrap=False)
        async with AsyncDataPlaneClient(client) as plane:
            await plane.register_partition("async", ["x"], 4, ["train"])
            claims = [
                asyncio.create_task(plane.claim_meta("async", "train", ["x"], 1, timeout_s=30))
                for _ in range(4)
            ]
            for name in "abcd":
                await plane.put_samples([name], "async", TensorDict({"x": torch.ones(1)}, [1]))
            return sorted([name for claim in claims for name in (await claim).sample_ids])

    assert asyncio.run(scenario()) == list("abcd")
    owner.clear_samples(None, "async")
