"""Modules that the processes of the data plane import; memory and start depend on them."""

from __future__ import annotations

import sys

from queue_setup import ask, batch

from dataplane_tq import TQDataPlaneClient


def test_directory_and_units_import_neither_torch_nor_tq(unforked_workers, cluster, config):
    with TQDataPlaneClient(config) as client:
        client.register_partition("train", ["x"], 2, ["t"])
        client.put_samples(["a", "b"], "train", batch(2))
        client.get_samples(["a", "b"], "train", ["x"])
        for part in ("DataPlaneDirectory", "DataPlanePackedUnit#0"):
            imported = ask(part, lambda _: list(sys.modules))
            assert not {"torch", "tensordict", "transfer_queue"} & set(imported), part
