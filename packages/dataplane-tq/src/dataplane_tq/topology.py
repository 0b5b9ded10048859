"""Brings TransferQueue up on a Ray cluster, finds it again, and takes it down.

The actors are TransferQueue's own controller and storage units, and the partition directory. They
are started here and not by ``transfer_queue.init``, which keeps one client per process, takes a
whole CPU for each actor, and whose ``close`` kills the controller from any process. The controller
keeps its usual name, so that TransferQueue's own tools find it.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any  # Any: Ray handles and OmegaConf nodes have no static types

import ray
from omegaconf import OmegaConf
from ray.exceptions import GetTimeoutError, RayError
from transfer_queue.controller import TransferQueueController
from transfer_queue.storage.simple_storage import SimpleStorageUnit

from dataplane_core import ConfigError, DataPlaneConfig, UnavailableError
from dataplane_tq.directory import PartitionDirectory
from dataplane_tq.sampler import ClaimSampler

NAMESPACE = "transfer_queue"
CONTROLLER = "TransferQueueController"
DIRECTORY = "DataPlaneDirectory"
BACKENDS = ("simple",)

_START_TIMEOUT_S = 120.0
# The actors mostly wait; a whole CPU for each would leave none to a small machine's workers.
_ACTOR_CPUS = 0.1


@dataclass(frozen=True)
class Topology:
    """The actors of one TransferQueue, and how to connect to them."""

    actors: dict[str, Any]
    connection: dict[str, Any]

    @property
    def directory(self) -> Any:
        """Handle of the partition directory."""
        return self.actors[DIRECTORY]

    def stop(self) -> None:
        """Kill every actor; their memory goes with them."""
        for actor in self.actors.values():
            ray.kill(actor)


def bootstrap(cfg: DataPlaneConfig) -> Topology:
    """Start TransferQueue as ``cfg`` sizes it.

    Raises:
        ConfigError: (a ValueError) on a backend that is not offered, or if this Ray cluster
            already has a TransferQueue.
        UnavailableError: Ray is not initialised, or the actors do not start in time.
    """
    _require_ray()
    backend = cfg["backend"]
    if backend not in BACKENDS:
        raise ConfigError(f"data-plane config: backend: found {backend!r}; expected {BACKENDS}")
    if _find(CONTROLLER) is not None:
        raise ConfigError(
            "this Ray cluster already runs a TransferQueue controller; attach to it with "
            "bootstrap=False, or close the client that started it"
        )
    units = cfg["num_storage_units"]
    defaults = OmegaConf.load(resources.files("transfer_queue") / "config.yaml")
    config = OmegaConf.create({}, flags={"allow_objects": True})
    config = OmegaConf.merge(
        config,
        defaults,
        {
            "controller": {"polling_mode": True},
            # The directory bounds what is stored, exactly and before anything is registered.
            "backend": {"SimpleStorage": {"num_data_storage_units": units}},
        },
    )
    options = {"num_cpus": _ACTOR_CPUS, "namespace": NAMESPACE}
    actors: dict[str, Any] = {}
    try:
        actors[CONTROLLER] = TransferQueueController.options(name=CONTROLLER, **options).remote(
            sampler=ClaimSampler(), polling_mode=True
        )
        unit_config = {**config.backend.SimpleStorage, "_run_id": uuid.uuid4().hex}
        for rank in range(units):
            name = f"TransferQueueStorageUnit#{rank}"
            actors[name] = SimpleStorageUnit.options(
                name=name, scheduling_strategy="SPREAD", **options
            ).remote(config=unit_config)
        directory = ray.remote(PartitionDirectory)
        actors[DIRECTORY] = directory.options(
            name=DIRECTORY, max_concurrency=1000, **options
        ).remote(cfg["storage_capacity"])
        connection = _describe(actors, config)
        ray.get(
            [
                actors[CONTROLLER].store_config.remote(config),
                actors[DIRECTORY].set_topology.remote(connection),
            ],
            timeout=_START_TIMEOUT_S,
        )
    except (RayError, ValueError) as error:
        for actor in actors.values():
            ray.kill(actor)
        needed = f"{len(actors)} actors of {_ACTOR_CPUS} CPU each"
        raise UnavailableError(
            f"TransferQueue did not start within {_START_TIMEOUT_S:g} s ({needed}): {error}"
        ) from error
    return Topology(actors, connection)


def _describe(actors: Mapping[str, Any], config: Any) -> dict[str, Any]:
    served = {name: actor for name, actor in actors.items() if name != DIRECTORY}
    infos = ray.get(
        [actor.get_zmq_server_info.remote() for actor in served.values()],
        timeout=_START_TIMEOUT_S,
    )
    addresses = dict(zip(served, infos, strict=True))
    controller = addresses.pop(CONTROLLER)
    config.controller.zmq_info = controller
    config.backend.SimpleStorage.zmq_info = addresses
    return {
        "manager": "SimpleStorage",
        "controller": controller,
        "backend": config.backend.SimpleStorage,
        "units": list(addresses),
    }


def attach(timeout_s: float) -> Topology:
    """Find the TransferQueue of this Ray cluster; wait for one that is still starting.

    Raises:
        UnavailableError: there is none, or it did not come up within ``timeout_s``.
    """
    _require_ray()
    deadline = time.monotonic() + timeout_s
    directory = _find(DIRECTORY)
    while True:
        if directory is not None:
            remaining = max(0.1, deadline - time.monotonic())
            try:
                connection = ray.get(directory.topology.remote(), timeout=remaining)
            except GetTimeoutError:
                connection = None
            except RayError as error:
                raise UnavailableError(f"the partition directory is gone: {error}") from error
            if connection is not None:
                names = [CONTROLLER, *connection["units"]]
                actors = {name: _find(name) for name in names} | {DIRECTORY: directory}
                gone = [name for name, actor in actors.items() if actor is None]
                if gone:
                    raise UnavailableError(f"TransferQueue is incomplete: {gone} are gone")
                return Topology(actors, connection)
        if time.monotonic() >= deadline:
            raise UnavailableError(
                f"no TransferQueue in this Ray cluster after {timeout_s:g} s; build a client with "
                "bootstrap=True on the driver first"
            )
        time.sleep(0.05)
        directory = directory or _find(DIRECTORY)


def _find(name: str) -> Any:
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def _require_ray() -> None:
    if not ray.is_initialized():
        raise UnavailableError("Ray is not initialised in this process; call ray.init() first")
