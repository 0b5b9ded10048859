"""How often the bulk crosses the link: a driver on the first machine, a writer on the second.

Prints, as JSON, the bytes that this machine received while they were put and while they were read.
Run by `test_two_machines`, on the machine of the storage unit.
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
    """By this machine so far, packet headers included."""
    line = Path("/proc/self/net/dev").read_text().split("eth0:")[1]
    return int(line.split()[0])


@ray.remote(num_cpus=0.1)
class Side:
    """A client of the data plane, on whichever machine it is."""

    def __init__(self, config: DataPlaneConfig) -> None:
        self._client = build_data_plane_client(config, bootstrap=False)

    def put(self) -> None:
        """Write all rows; random bytes, so that nothing along the way makes them fewer."""
        values = torch.randint(0, 256, (ROWS, WIDTH), dtype=torch.uint8)
        self._client.put_samples(IDS, PARTITION, TensorDict({"bulk": values}, [ROWS]))

    def get(self) -> int:
        """Read all rows; their bytes."""
        found = self._client.get_samples(IDS, PARTITION, ["bulk"])
        return sum(row.nbytes for row in found["bulk"])


def main(address: str, here: str, there: str) -> None:
    """Measure."""
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
        "unit_resources": {here: 1},
    }
    with build_data_plane_client(config, bootstrap=True) as client:
        client.register_partition(PARTITION, ["bulk"], ROWS, [])
        writer = Side.options(resources={there: 1}).remote(config)
        reader = Side.options(resources={here: 1}).remote(config)
        counts = [received()]
        ray.get(writer.put.remote(), timeout=60)
        counts.append(received())
        read = ray.get(reader.get.remote(), timeout=60)
        counts.append(received())
    ray.shutdown()
    put, got = (after - before for before, after in itertools.pairwise(counts))
    print(json.dumps({"bulk": ROWS * WIDTH, "read": read, "put": put, "got": got}))


if __name__ == "__main__":
    main(*sys.argv[1:])
