"""Modules that the processes of the data plane import; memory and start depend on them."""

from __future__ import annotations

import sys

import ray
import torch
from tensordict import TensorDict

from dataplane_tq import TQDataPlaneClient


def test_directory_and_units_import_neither_torch_nor_tq(unforked_workers, cluster, config):
    with TQDataPlaneClient(config) as client:
        client.register_partition("train", ["x"], 2, ["t"])
        client.put_samples(["a", "b"], "train", TensorDict({"x": torch.zeros(2)}, [2]))
        client.get_samples(["a", "b"], "train", ["x"])
        for part in ("DataPlaneDirectory", "DataPlanePackedUnit#0"):
            actor = ray.get_actor(part, namespace="transfer_queue")
            imported = ray.get(actor.__ray_call__.remote(lambda self: list(sys.modules)))
            assert not {"torch", "tensordict", "transfer_queue"} & set(imported), part
