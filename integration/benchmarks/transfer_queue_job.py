"""A job on TransferQueue's own API: four worker processes, on one backend.

Imports internals: importing the module registers the backend.
"""

from __future__ import annotations

import time
from multiprocessing.connection import Connection
from typing import Any  # Any: Ray handles have no static types

import ray
import transfer_queue as tq
from integration.benchmarks.cases import FIELDS, QUICK_CASES, Batch, check_answer
from integration.temporary_ray import temporary_ray
from omegaconf import OmegaConf

import dataplane_tq.storage.packed_bootstrap  # noqa: F401  # registers the backend

WORKERS = 4
UNITS = 2
CONFIGURATIONS = {
    "SimpleStorage": {"num_data_storage_units": UNITS},
    "PackedStorage": {"num_storage_units": UNITS, "global_segment_size": 1 << 30},
}
(CASE,) = QUICK_CASES


class Worker:
    """Process of a job that uses TransferQueue's key-value API."""

    def __init__(self) -> None:
        self._batch = Batch(CASE)
        self._batch.jagged  # noqa: B018  # built once, before the first put
        tq.init()

    def put(self, partition: str) -> float:
        """Put the batch; return the seconds."""
        started = time.perf_counter()
        tq.kv_batch_put(keys=self._batch.ids, partition_id=partition, fields=self._batch.jagged)
        return time.perf_counter() - started

    def get(self, partition: str) -> float:
        """Get the batch, check it and clear the partition; return the seconds of the get."""
        started = time.perf_counter()
        answer = tq.kv_batch_get(keys=self._batch.ids, partition_id=partition)
        seconds = time.perf_counter() - started
        check_answer(self._batch, FIELDS, answer, system=partition)
        tq.kv_clear(keys=self._batch.ids, partition_id=partition)
        return seconds


def serve(pipe: Connection, backend: str) -> None:
    """Start a backend and its workers, and run the rounds that the pipe asks for.

    A request is the round's number and how many workers take part. The answer is their seconds of
    the put and of the get.
    """
    with temporary_ray(num_cpus=16):
        storage = {"storage_backend": backend, backend: CONFIGURATIONS[backend]}
        tq.init(OmegaConf.create({"controller": {"polling_mode": True}, "backend": storage}))
        actor: Any = ray.remote(Worker)
        workers = [actor.options(num_cpus=0.1).remote() for _ in range(WORKERS)]
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
                }
            )
        tq.close()
