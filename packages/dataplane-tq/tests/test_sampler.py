"""A user's sampler, and what TransferQueue's own clients see of our claims."""

from __future__ import annotations

import time

import torch
from tensordict import TensorDict

from dataplane_tq import TQDataPlaneClient


def test_transfer_queues_own_clients_get_what_a_users_sampler_gives(cluster, config):
    """And what our clients claimed is consumed for them as well."""
    path = "transfer_queue.sampler:GRPOGroupNSampler"
    with TQDataPlaneClient({**config, "sampler": path}) as client:
        client.register_partition("train", ["x"], 8, ["train"])
        client.put_samples(
            list("abcdef"), "train", TensorDict({"x": torch.ones(6, 4)}, batch_size=[6])
        )
        claimed = client.claim_meta("train", "train", ["x"], 2)
        engine = client._engine

        def unclaimed():
            status = engine.client.async_get_consumption_status("train", "train")
            consumed = engine.run("status", lambda: status)[1]
            return None if consumed is None else int((consumed == 0).sum())  # not told yet

        deadline = time.monotonic() + 20
        while unclaimed() != 4:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        rows = engine.run(
            "raw",
            engine.client.async_get_meta,
            data_fields=["x"],
            batch_size=4,
            partition_id="train",
            mode="fetch",
            task_name="train",
            sampling_config={"n_samples_per_prompt": 2},
        )
        assert rows.size == 4
        assert claimed.sample_ids == ["a", "b"]
