"""A job on TransferQueue's own API: four worker processes, on one backend.

Imports internals: importing the module registers the backend.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any  # Any: Ray handles have no static types

import numpy as np
import ray
import transfer_queue as tq
from integration.benchmarks.cases import FIELDS, QUICK_CASES, Batch, check_answer
from integration.temporary_ray import temporary_ray
from omegaconf import OmegaConf
from tensordict import TensorDict

import dataplane_tq.storage.packed_bootstrap  # noqa: F401  # registers the backend
from dataplane_tq.storage.packed_rows import Cells, RawStore

WORKERS = 4
UNITS = 2
CONFIGURATIONS = {
    "SimpleStorage": {"num_data_storage_units": UNITS},
    "PackedStorage": {"num_storage_units": UNITS, "global_segment_size": 1 << 30},
}
NOTHING = "nothing stored"
"""Packed with puts that only report their rows to the controller: no backend's put is faster."""
(CASE,) = QUICK_CASES
_SINGLE_ROWS = 16
"""Rows that a round puts one at a time."""


def report_only(
    store: RawStore,
    partition_id: str,
    indexes: Sequence[int],
    data: TensorDict,
    meta: Cells,
    report: Callable[[Cells], None],
) -> Cells:
    """Replace `RawStore.put`: report the rows, but store nothing."""
    cells = {str(name): np.zeros(len(indexes), np.int64) for name, _ in data.items()}
    report(cells)
    return cells


class Worker:
    """Process of a job that uses TransferQueue's key-value API.

    Args:
        stores: whether puts store their values.
    """

    def __init__(self, stores: bool) -> None:
        self._stores = stores
        if not stores:
            RawStore.put = report_only  # type: ignore[method-assign]
        self._batch = Batch(CASE)
        self._batch.jagged  # noqa: B018  # built once, before the first put
        self._row = Batch(replace(CASE, rows=1)).jagged
        tq.init()

    def put(self, partition: str) -> float:
        """Put the batch; return the seconds."""
        started = time.perf_counter()
        tq.kv_batch_put(keys=self._batch.ids, partition_id=partition, fields=self._batch.jagged)
        return time.perf_counter() - started

    def put_rows(self, partition: str) -> float:
        """Put single rows and clear them; return the seconds of one put."""
        keys = self._batch.ids[:_SINGLE_ROWS]
        started = time.perf_counter()
        for key in keys:
            tq.kv_batch_put(keys=[key], partition_id=partition, fields=self._row)
        seconds = (time.perf_counter() - started) / len(keys)
        tq.kv_clear(keys=keys, partition_id=partition)
        return seconds

    def get(self, partition: str) -> float:
        """Get the batch, check it and clear the partition; return the seconds of the get.

        If nothing is stored, only clear.
        """
        started = time.perf_counter()
        if not self._stores:
            tq.kv_clear(keys=self._batch.ids, partition_id=partition)
            return 0.0
        answer = tq.kv_batch_get(keys=self._batch.ids, partition_id=partition)
        seconds = time.perf_counter() - started
        check_answer(self._batch, FIELDS, answer, system=partition)
        tq.kv_clear(keys=self._batch.ids, partition_id=partition)
        return seconds


def serve(pipe: Connection, backend: str) -> None:
    """Start a backend, or `NOTHING`, and its workers, and run the rounds that the pipe asks for.

    A request is the round's number and how many workers take part. The answer is their seconds of
    each call.
    """
    with temporary_ray(num_cpus=16):
        name = "PackedStorage" if backend == NOTHING else backend
        storage = {"storage_backend": name, name: CONFIGURATIONS[name]}
        tq.init(OmegaConf.create({"controller": {"polling_mode": True}, "backend": storage}))
        actor: Any = ray.remote(Worker)
        workers = [actor.options(num_cpus=0.1).remote(backend != NOTHING) for _ in range(WORKERS)]
        ray.get([worker.__ray_ready__.remote() for worker in workers])
        pipe.send("ready")
        while (request := pipe.recv()) != "stop":
            number, count = request
            partitions = [f"round-{number}-{index}" for index in range(count)]
            each = list(zip(workers, partitions, strict=False))
            pipe.send(
                {
                    "put": ray.get([worker.put.remote(name) for worker, name in each]),
                    "get": ray.get([worker.get.remote(name) for worker, name in each]),
                    "put_row": ray.get([worker.put_rows.remote(name) for worker, name in each]),
                }
            )
        tq.close()
