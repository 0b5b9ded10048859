"""A TransferQueue as it ships, beside ours in one Ray cluster, and a process's client of it.

It is started by hand because `transfer_queue.init` takes one whole CPU for each actor and always
the namespace that our client uses. From there on everything is TransferQueue's own code.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from importlib import resources
from typing import Any  # Any: Ray handles and OmegaConf nodes have no static types

import ray
from omegaconf import OmegaConf
from transfer_queue import TransferQueueClient, interface
from transfer_queue.controller import TransferQueueController
from transfer_queue.storage.simple_storage import SimpleStorageUnit

NAMESPACE = "benchmark_plain_queue"
_BACKEND = "SimpleStorage"


@dataclass(frozen=True)
class PlainQueue:
    """A running TransferQueue.

    Attributes:
        actors: its controller and its one storage unit.
        config: what `connect` needs; it travels to other processes.
    """

    actors: list[Any]
    config: Any

    def stop(self) -> None:
        """Kill the actors."""
        for actor in self.actors:
            ray.kill(actor)


def start(cpus: float) -> PlainQueue:
    """Start a controller and one storage unit of ``cpus`` CPUs each.

    Polling mode, because without it a claim of more than there is stops the controller for
    seconds; everything else is the default.
    """
    options = {"num_cpus": cpus, "namespace": NAMESPACE}
    config = OmegaConf.load(resources.files("transfer_queue") / "config.yaml")
    config = OmegaConf.merge(
        OmegaConf.create({}, flags={"allow_objects": True}),
        config,
        {
            "controller": {"polling_mode": True},
            "backend": {_BACKEND: {"num_data_storage_units": 1}},
        },
    )
    controller = TransferQueueController.options(name="Controller", **options).remote(
        polling_mode=True
    )
    unit = SimpleStorageUnit.options(name="StorageUnit", **options).remote(
        config={**config.backend[_BACKEND], "_run_id": uuid.uuid4().hex}
    )
    config.controller.zmq_info, unit_info = ray.get(
        [controller.get_zmq_server_info.remote(), unit.get_zmq_server_info.remote()]
    )
    config.backend[_BACKEND].zmq_info = {"StorageUnit": unit_info}
    return PlainQueue([controller, unit], config)


def connect(config: Any) -> TransferQueueClient:
    """The client of this process, which `transfer_queue.kv_batch_put` and the like use from now on.

    The same steps as `transfer_queue.init` takes in a process that attaches.
    """
    if interface._TQ_CLIENT is None:
        client = TransferQueueClient(
            client_id=f"benchmark_{uuid.uuid4().hex[:8]}",
            controller_info=config.controller.zmq_info,
        )
        client.initialize_storage_manager(_BACKEND, config.backend[_BACKEND])
        interface._TQ_CLIENT = client
    return interface._TQ_CLIENT
