"""The processes of a run: a Ray of its own, the stores, and the producer and consumer."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any  # Any: Ray handles have no static types

import ray
from integration.benchmarks.garbage import freeze_garbage
from integration.benchmarks.harness import Pair
from integration.benchmarks.systems import System, plain_queue
from integration.benchmarks.worker import Worker

from dataplane_tq import TQDataPlaneClient, start_local_ray

_LOGICAL_CPUS = 4
_ACTOR_CPUS = 0.1
# Several of the largest batches; all of it is touched before it is used.
_QUICK_OBJECT_STORE_BYTES, _FULL_OBJECT_STORE_BYTES = 512 << 20, 2 << 30
_FILLER_BYTES = 16 << 20
_START_TIMEOUT_S = 180.0

Workers = tuple[Any, Any]
"""Handles of the producer and of the consumer."""


@contextmanager
def ray_cluster(*, full: bool) -> Iterator[None]:
    """A Ray on this machine alone, with its files in a folder that goes away.

    The data plane's sessions and the traced steps share it, since starting one takes seconds.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        start_local_ray(
            num_cpus=_LOGICAL_CPUS,
            object_store_memory=_object_store_bytes(full),
            include_dashboard=False,
            _temp_dir=folder,
            namespace="benchmarks",
            logging_level="ERROR",
            log_to_driver=False,
        )
        try:
            yield
        finally:
            ray.shutdown()


@contextmanager
def plain_transfer_queue() -> Iterator[plain_queue.PlainQueue]:
    """The TransferQueue that `Raw` and `Usual` share; it goes on starting in the background."""
    queue = plain_queue.PlainQueue(_ACTOR_CPUS)
    try:
        yield queue
    finally:
        queue.stop()


@contextmanager
def our_transfer_queue(cfg: Mapping[str, Any]) -> Iterator[None]:
    """The TransferQueue behind `Ours`, started by our client; ConfigError if it cannot be had."""
    with TQDataPlaneClient(cfg, bootstrap=True):
        yield


@contextmanager
def two_workers() -> Iterator[Workers]:
    """The producer's and the consumer's process, which go on starting in the background."""
    worker: Any = ray.remote(Worker).options(num_cpus=_ACTOR_CPUS)
    workers = worker.remote(), worker.remote()
    try:
        yield workers
    finally:
        for handle in workers:
            ray.kill(handle)


@contextmanager
def connected(workers: Workers, connect: Mapping[str, Callable[[], System]]) -> Iterator[Pair]:
    """The two processes with the same systems, which are closed at the end."""
    connecting = [worker.connect.remote(connect) for worker in workers]
    operations, _ = ray.get(connecting, timeout=_START_TIMEOUT_S)
    yield Pair(*workers, operations)
    ray.get([worker.close.remote() for worker in workers])


def warm_object_store(pair: Pair, *, full: bool) -> None:
    """Give Ray's object store its best state, in which no page of it is new to either process.

    The first touch of a page costs about ten times as much as the copy into it, and would come and
    go with the place that the store happens to choose for an object.
    """
    # Ray moves objects to disk from 80 % on. What is freed is what it takes again first.
    objects = int(0.7 * _object_store_bytes(full) / _FILLER_BYTES)
    references = ray.get(pair.producer.fill_object_store.remote(objects, _FILLER_BYTES))
    ray.get(pair.consumer.read_object_store.remote(references))


def _object_store_bytes(full: bool) -> int:
    return _FULL_OBJECT_STORE_BYTES if full else _QUICK_OBJECT_STORE_BYTES


def settle_stores() -> None:
    """`freeze_garbage` in every named actor: controllers, storage units, and what else we start."""
    settled = []
    for actor in ray.util.list_named_actors(all_namespaces=True):
        handle = ray.get_actor(actor["name"], namespace=actor["namespace"])
        settled.append(handle.__ray_call__.remote(freeze_garbage))
    ray.get(settled)
