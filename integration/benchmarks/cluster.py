"""Processes of a run: a separate Ray, the stores, and the producer and consumer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any  # Any: Ray handles have no static types

import ray
from integration.benchmarks.garbage import freeze_garbage
from integration.benchmarks.harness import Pair
from integration.benchmarks.systems import System, plain_queue
from integration.benchmarks.worker import Worker
from integration.temporary_ray import temporary_ray

from dataplane_tq import TQDataPlaneClient

_LOGICAL_CPUS = 4
_ACTOR_CPUS = 0.1
# Space for several of the largest batches; all of it is touched before it is used.
_QUICK_OBJECT_STORE_BYTES, _FULL_OBJECT_STORE_BYTES = 512 << 20, 2 << 30
_FILLER_BYTES = 16 << 20
_START_TIMEOUT_S = 180.0

Workers = tuple[Any, Any]
"""Handles of the producer and of the consumer."""


def ray_cluster(*, full: bool) -> AbstractContextManager[None]:
    """Return the context of a Ray on this machine only.

    The data plane's sessions and the traced steps share it, since its start takes seconds.
    """
    return temporary_ray(
        num_cpus=_LOGICAL_CPUS,
        object_store_memory=_object_store_bytes(full),
        namespace="benchmarks",
    )


@contextmanager
def plain_transfer_queue() -> Iterator[plain_queue.PlainQueue]:
    """Run the TransferQueue that `Raw` and `Usual` share; it starts in the background."""
    queue = plain_queue.PlainQueue(_ACTOR_CPUS)
    try:
        yield queue
    finally:
        queue.stop()


@contextmanager
def data_plane(cfg: Mapping[str, Any]) -> Iterator[None]:
    """Run the data plane behind `DataPlane`; raise ConfigError if the backend is not available."""
    with TQDataPlaneClient(cfg, bootstrap=True):
        yield


@contextmanager
def two_workers() -> Iterator[Workers]:
    """Run the producer's and the consumer's process; they start in the background."""
    worker: Any = ray.remote(Worker).options(num_cpus=_ACTOR_CPUS)
    workers = worker.remote(), worker.remote()
    try:
        yield workers
    finally:
        for handle in workers:
            ray.kill(handle)


@contextmanager
def connected(workers: Workers, connect: Mapping[str, Callable[[], System]]) -> Iterator[Pair]:
    """Connect the two processes to the same systems, and close these at the end."""
    connecting = [worker.connect.remote(connect) for worker in workers]
    operations, _ = ray.get(connecting, timeout=_START_TIMEOUT_S)
    yield Pair(*workers, operations)
    ray.get([worker.close.remote() for worker in workers])


def warm_object_store(pair: Pair, *, full: bool) -> None:
    """Touch every page of Ray's object store in both processes, so that it is at its fastest.

    The first touch of a page costs about ten times as much as the copy into it. Without the
    warm-up, its cost would depend on the address that the store chooses for an object.
    """
    # Ray moves objects to disk from 80 % on. It reuses freed memory first.
    objects = int(0.7 * _object_store_bytes(full) / _FILLER_BYTES)
    references = ray.get(pair.producer.fill_object_store.remote(objects, _FILLER_BYTES))
    ray.get(pair.consumer.read_object_store.remote(references))


def _object_store_bytes(full: bool) -> int:
    return _FULL_OBJECT_STORE_BYTES if full else _QUICK_OBJECT_STORE_BYTES


def freeze_stores() -> None:
    """Freeze garbage collection in every named actor: controllers, storage units, directories."""
    calls = []
    for actor in ray.util.list_named_actors(all_namespaces=True):
        handle = ray.get_actor(actor["name"], namespace=actor["namespace"])
        calls.append(handle.__ray_call__.remote(freeze_garbage))
    ray.get(calls)
