"""An unmodified TransferQueue in the Ray cluster of the data plane, and a process's client of it.

`transfer_queue.init` reserves one CPU per actor and uses the data plane's namespace, so its actors
are started here directly. Everything else is TransferQueue's own code.
"""

from __future__ import annotations

import uuid
from functools import cached_property
from importlib import resources
from typing import Any  # Any: Ray handles and OmegaConf nodes have no static types

import ray
from omegaconf import OmegaConf
from transfer_queue import TransferQueueClient, interface
from transfer_queue.controller import TransferQueueController
from transfer_queue.storage.simple_storage import SimpleStorageUnit

NAMESPACE = "benchmark_plain_queue"
_BACKEND = "SimpleStorage"


class PlainQueue:
    """TransferQueue of a controller and one storage unit, which start in the background.

    Its options are the defaults, except for polling mode: without it, a claim of more rows than
    there are stops the controller for seconds.

    Args:
        cpus: CPUs of each of the two actors.
    """

    def __init__(self, cpus: float) -> None:
        options = {"num_cpus": cpus, "namespace": NAMESPACE}
        config = OmegaConf.load(resources.files("transfer_queue") / "config.yaml")
        self._config = OmegaConf.merge(
            OmegaConf.create({}, flags={"allow_objects": True}),
            config,
            {
                "controller": {"polling_mode": True},
                "backend": {_BACKEND: {"num_data_storage_units": 1}},
            },
        )
        self._controller = TransferQueueController.options(name="Controller", **options).remote(
            polling_mode=True
        )
        self._unit = SimpleStorageUnit.options(name="StorageUnit", **options).remote(
            config={**self._config.backend[_BACKEND], "_run_id": uuid.uuid4().hex}
        )

    @cached_property
    def config(self) -> Any:
        """Configuration for `connect` in any process; waits until both actors run."""
        controller_info, unit_info = ray.get(
            [
                self._controller.get_zmq_server_info.remote(),
                self._unit.get_zmq_server_info.remote(),
            ]
        )
        self._config.controller.zmq_info = controller_info
        self._config.backend[_BACKEND].zmq_info = {"StorageUnit": unit_info}
        return self._config

    def stop(self) -> None:
        """Kill the actors."""
        for actor in (self._controller, self._unit):
            ray.kill(actor)


def connect(config: Any) -> TransferQueueClient:
    """Connect this process as `transfer_queue.init` does in a process that attaches.

    `transfer_queue.kv_batch_put` and its siblings use the returned client from now on.
    """
    if interface._TQ_CLIENT is None:
        client = TransferQueueClient(
            client_id=f"benchmark_{uuid.uuid4().hex[:8]}",
            controller_info=config.controller.zmq_info,
        )
        client.initialize_storage_manager(_BACKEND, config.backend[_BACKEND])
        interface._TQ_CLIENT = client
    return interface._TQ_CLIENT
