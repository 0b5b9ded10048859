"""Count how often bulk data crosses the link between two machines.

The driver and the storage unit are on the first machine, the writer is on the second. The program
prints, as JSON, the bytes that the first machine receives during the put and during the read.
`test_two_machines` runs it.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import ray
import torch
from tensordict import TensorDict

from dataplane_core import DataPlaneConfig, build_data_plane_client

ROWS, WIDTH = 256, 64 << 10
PARTITION = "crossing"
IDS = [f"sample-{number}" for number in range(ROWS)]


def received() -> int:
    """Return the bytes that this machine received so far, with packet headers."""
    line = Path("/proc/self/net/dev").read_text().split("eth0:")[1]
    return int(line.split()[0])


@ray.remote(num_cpus=0.1)
class Side:
    """An actor with a client of the data plane."""

    def __init__(self, config: DataPlaneConfig) -> None:
        self._client = build_data_plane_client(config, bootstrap=False)

    def put(self) -> None:
        """Write all rows: random bytes, which cannot be compressed."""
        values = torch.randint(0, 256, (ROWS, WIDTH), dtype=torch.uint8)
        self._client.put_samples(IDS, PARTITION, TensorDict({"bulk": values}, [ROWS]))

    def get(self) -> int:
        """Read all rows; return their size in bytes."""
        columns = self._client.get_samples(IDS, PARTITION, ["bulk"])
        return sum(row.nbytes for row in columns["bulk"])


def main(address: str, first: str, second: str) -> None:
    """Measure with the machines that have the resources ``first`` and ``second``; print JSON."""
    ray.init(address=address, namespace="crossing", logging_level="ERROR", log_to_driver=False)
    config: DataPlaneConfig = {
        "enabled": True,
        "impl": "transfer_queue",
        "backend": "packed",
        "storage_capacity": ROWS,
        "num_storage_units": 1,
        "claim_meta_poll_interval_s": 1.0,
        "global_segment_size": 2 * ROWS * WIDTH,
        "local_buffer_size": 0,
        "unit_resources": {first: 1},
    }
    with build_data_plane_client(config, bootstrap=True) as client:
        client.register_partition(PARTITION, ["bulk"], ROWS, [])
        writer = Side.options(resources={second: 1}).remote(config)
        reader = Side.options(resources={first: 1}).remote(config)
        counts = [received()]
        ray.get(writer.put.remote(), timeout=180)
        counts.append(received())
        read = ray.get(reader.get.remote(), timeout=180)
        counts.append(received())
    ray.shutdown()
    put, got = (after - before for before, after in itertools.pairwise(counts))
    print(json.dumps({"bulk": ROWS * WIDTH, "read": read, "put": put, "got": got}))


if __name__ == "__main__":
    main(*sys.argv[1:])
