"""The processes of a run: a Ray of its own, the stores, and the producer and consumer."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any  # Any: Ray handles have no static types

import ray
from integration.benchmarks.harness import Pair
from integration.benchmarks.systems import System, plain_queue
from integration.benchmarks.worker import Worker, freeze_garbage

from dataplane_tq import TQDataPlaneClient

_LOGICAL_CPUS = 4
_ACTOR_CPUS = 0.1
_OBJECT_STORE_BYTES = 2 << 30  # several of the largest batches
_FILLER_BYTES = 16 << 20
_START_TIMEOUT_S = 180.0


@contextmanager
def ray_cluster() -> Iterator[None]:
    """A Ray on this machine alone, with its files in a folder that goes away."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        ray.init(
            num_cpus=_LOGICAL_CPUS,
            object_store_memory=_OBJECT_STORE_BYTES,
            include_dashboard=False,
            _node_ip_address="127.0.0.1",
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
    """The TransferQueue that `Raw` and `Usual` share."""
    queue = plain_queue.start(_ACTOR_CPUS)
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
def worker_pair(connect: Mapping[str, Callable[[], System]]) -> Iterator[Pair]:
    """A producer and a consumer with the same systems."""
    worker: Any = ray.remote(Worker).options(num_cpus=_ACTOR_CPUS)
    producer, consumer = worker.remote(connect), worker.remote(connect)
    try:
        operations = ray.get(
            [producer.operations.remote(name) for name in connect], timeout=_START_TIMEOUT_S
        )
        ray.get(consumer.settle.remote(), timeout=_START_TIMEOUT_S)
        yield Pair(producer, consumer, dict(zip(connect, operations, strict=True)))
        ray.get([producer.close.remote(), consumer.close.remote()])
    finally:
        ray.kill(producer)
        ray.kill(consumer)


def warm_object_store(pair: Pair) -> None:
    """Give Ray's object store its best state, in which no page of it is new to either process.

    The first touch of a page costs about ten times as much as the copy into it, and would come and
    go with the place that the store happens to choose for an object.
    """
    # Ray moves objects to disk from 80 % on. What is freed is what it takes again first.
    objects = int(0.7 * _OBJECT_STORE_BYTES / _FILLER_BYTES)
    references = ray.get(pair.producer.fill_object_store.remote(objects, _FILLER_BYTES))
    ray.get(pair.consumer.read_object_store.remote(references))


def settle_stores() -> None:
    """`freeze_garbage` in every named actor: controllers, storage units, and what else we start."""
    settled = []
    for actor in ray.util.list_named_actors(all_namespaces=True):
        handle = ray.get_actor(actor["name"], namespace=actor["namespace"])
        settled.append(handle.__ray_call__.remote(freeze_garbage))
    ray.get(settled)
