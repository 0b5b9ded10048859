"""Layers above clients work with a client of the published contract alone."""

import asyncio
import functools

import torch
from tensordict import TensorDict

from dataplane_core import (
    AsyncDataPlaneClient,
    InMemoryDataPlaneClient,
    StreamingDataLoader,
    StreamingDataset,
)

IDS = ["a", "b", "c", "d"]


class Published(InMemoryDataPlaneClient):
    """Client whose claims have the published keywords only."""

    def claim_meta(
        self,
        partition_id,
        task_name,
        required_fields,
        batch_size,
        dp_rank=None,
        blocking=True,
        timeout_s=60.0,
    ):
        return super().claim_meta(
            partition_id, task_name, required_fields, batch_size, dp_rank, blocking, timeout_s
        )


def store():
    client = Published({"enabled": True, "impl": "in_memory"})
    client.register_partition("train", ["x"], len(IDS), ["train"])
    client.put_samples(IDS, "train", TensorDict({"x": torch.arange(4.0)}, [4]))
    return client


def test_async_client_claims_from_a_published_client():
    async def claimed(client):
        async with AsyncDataPlaneClient(client) as awaited:
            return await awaited.claim_meta("train", "train", ["x"], 4, timeout_s=20.0)

    with store() as client:
        assert sorted(asyncio.run(claimed(client)).sample_ids) == IDS


def test_streaming_loader_reads_from_a_published_client():
    with store():
        dataset = StreamingDataset(
            functools.partial(Published, bootstrap=False),
            "train",
            "train",
            required_fields=["x"],
            batch_size=2,
            timeout_s=20.0,
        )
        claimed = []
        with StreamingDataLoader(dataset) as loader:
            for _, meta in loader:
                claimed += meta.sample_ids
                if len(claimed) == len(IDS):
                    break
        assert sorted(claimed) == IDS
