"""Store whose cost is measured as it grows: the packed backend on Ray, and its processes."""

from __future__ import annotations

# ruff: noqa: TID251
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil
import ray
from integration.benchmarks.growth_client import Store
from integration.benchmarks.systems.data_plane import config

from dataplane_tq import TQDataPlaneClient, topology
from dataplane_tq.actor_names import DIRECTORY, NAMESPACE

_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class GrowingStore:
    """A running store.

    Attributes:
        client: client of this process.
        address: data with which light clients connect.
        directory: process of the directory.
        units: processes of the storage units.
    """

    client: TQDataPlaneClient
    address: Store
    directory: psutil.Process
    units: list[psutil.Process]

    def cpu_s(self) -> dict[str, float]:
        """Return the CPU time used so far by the directory, all units, and the entire machine."""
        machine = psutil.cpu_times()
        return {
            "directory": _cpu_s(self.directory),
            "units": sum(map(_cpu_s, self.units)),
            "machine": sum(machine) - machine.idle - machine.iowait - machine.guest,
        }


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@contextmanager
def growing_store(*, units: int, unit_bytes: int, capacity: int) -> Iterator[GrowingStore]:
    """Run a store without the mirror, whose cost is that of TransferQueue's controller."""
    cfg = config(
        "packed",
        transfer_queue_mirror=False,
        num_storage_units=units,
        global_segment_size=unit_bytes,
        storage_capacity=capacity,
        claim_lease_s=_TIMEOUT_S,
    )
    with TQDataPlaneClient(cfg, bootstrap=True) as client:
        running = topology.attach(_TIMEOUT_S).connection
        address = Store(running.directory, running.storage["units"], running.storage["token"])
        directory = ray.get_actor(DIRECTORY, namespace=NAMESPACE)
        pid = ray.get(directory.__ray_call__.remote(lambda _: os.getpid()), timeout=_TIMEOUT_S)
        processes = [psutil.Process(unit.pid) for unit in address.units.values()]
        yield GrowingStore(client, address, psutil.Process(pid), processes)
