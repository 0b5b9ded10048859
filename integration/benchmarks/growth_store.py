"""Store whose cost is measured as it grows: the packed backend on Ray, and its processes.

Imports internals: it needs the names and addresses of the store's processes.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any  # Any: a configuration

import psutil
import ray
import torch
from integration.benchmarks.growth_client import Store
from integration.benchmarks.growth_sample import PER_SAMPLE, PER_TOKEN, TOKENS
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


def growing_config(*, units: int, unit_bytes: int, capacity: int, **extra: Any) -> dict[str, Any]:
    """Return a configuration without the mirror, whose cost is that of TransferQueue's controller.

    ``extra`` keys are added unchanged.
    """
    return config(
        "packed",
        transfer_queue_mirror=False,
        num_storage_units=units,
        global_segment_size=unit_bytes,
        storage_capacity=capacity,
        claim_lease_s=_TIMEOUT_S,
        **extra,
    )


@functools.cache
def small_columns(rows: int) -> dict[str, torch.Tensor]:
    """Return the columns of ``rows`` samples with the fields of `growth_sample`."""
    per_token = {
        name: torch.ones(rows, TOKENS, dtype=_dtype(kind)) for name, kind in PER_TOKEN.items()
    }
    per_sample = {name: torch.ones(rows, dtype=_dtype(kind)) for name, kind in PER_SAMPLE.items()}
    return {**per_token, **per_sample, "input_lengths": torch.full((rows,), TOKENS)}


def _dtype(kind: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, kind.removeprefix("torch."))
    return dtype


@contextmanager
def growing_store(*, units: int, unit_bytes: int, capacity: int) -> Iterator[GrowingStore]:
    """Run a store with the configuration of `growing_config`."""
    cfg = growing_config(units=units, unit_bytes=unit_bytes, capacity=capacity)
    with TQDataPlaneClient(cfg, bootstrap=True) as client:
        running = topology.attach(_TIMEOUT_S).connection
        address = Store(running.directory, running.storage["units"], running.storage["token"])
        directory = ray.get_actor(DIRECTORY, namespace=NAMESPACE)
        pid = ray.get(directory.__ray_call__.remote(lambda _: os.getpid()), timeout=_TIMEOUT_S)
        processes = [psutil.Process(unit.pid) for unit in address.units.values()]
        yield GrowingStore(client, address, psutil.Process(pid), processes)
