"""Starts, finds and stops a TransferQueue on a Ray cluster.

The actors are TransferQueue's own controller, the actors of a storage backend, and the partition
directory. ``transfer_queue.init`` is not used: it allows one client per process and reserves one
CPU per actor, and a ``close`` in any process kills the controller. The controller has its usual
name, so TransferQueue's own tools find it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar  # Any: Ray handles and OmegaConf nodes have no static types

import ray
from omegaconf import OmegaConf
from ray.exceptions import GetTimeoutError, RayError

from dataplane_core import ConfigError, DataPlaneConfig, DataPlaneError, UnavailableError
from dataplane_core.deadlines import call_within
from dataplane_core.ledger import load_order
from dataplane_tq.actor_names import CONTROLLER, DIRECTORY, NAMESPACE
from dataplane_tq.directory.actor import DirectoryActor, bind_actor
from dataplane_tq.directory.wire import Address
from dataplane_tq.mirror.sampler import ConsumptionSampler, load_sampler
from dataplane_tq.ray_errors import reason_of
from dataplane_tq.storage import BACKENDS
from dataplane_tq.storage.base import (
    ACTOR_CPUS,
    START_S,
    Registration,
    StorageBackend,
    end_actor,
)
from dataplane_tq.storage.packed import Packed
from dataplane_tq.storage.simple import defaults
from dataplane_tq.upstream import StorageManagerFactory, TransferQueueController

T = TypeVar("T")

_DEFAULTS: dict[str, Any] = {
    "unit_resources": {},
    "packed_transport": "auto",
    "claim_order": None,
    "sampler": None,
    "transfer_queue_mirror": True,
}
_STORE_KEYS = (
    *("backend", "storage_capacity", "num_storage_units"),
    *("global_segment_size", "local_buffer_size"),
    *_DEFAULTS,
)
"""Keys whose values the bootstrapping client sets for all clients of the store."""

_RAY_GRACE_S = 1.0
_FOREIGN = (
    f"this Ray cluster runs a TransferQueue that dataplane-tq did not start: there is a "
    f"{CONTROLLER} and no {DIRECTORY}"
)
_SILENT = (
    "no TransferQueue found: Ray did not answer within {:g} s; its control store (GCS) or this "
    "node's raylet is stopped or unreachable"
)


@dataclass(frozen=True)
class ConnectionData:
    """Data with which a client connects.

    Attributes:
        backend: name of the storage backend, as in the configuration.
        controller: TransferQueue's description of the controller's sockets; None if the mirror is
            off.
        storage: configuration of the storage manager.
        directory: address of the directory.
        settings: the store's values of the configuration keys that it determines.
    """

    backend: str
    controller: Any
    storage: dict[str, Any]
    directory: Address
    settings: dict[str, Any]


@dataclass(frozen=True)
class Topology:
    """Actors of one TransferQueue, and the data to connect to them."""

    actors: dict[str, Any]
    connection: ConnectionData
    storage: StorageBackend | None = None

    def stop(self) -> None:
        """Kill every actor that was started here; their data is lost."""
        for name in (DIRECTORY, CONTROLLER):
            if name in self.actors:
                end_actor(self.actors[name])
        if self.storage is not None:
            self.storage.stop()


def bootstrap(cfg: DataPlaneConfig) -> Topology:
    """Start TransferQueue according to ``cfg``.

    Raises:
        ConfigError: (a ValueError) the backend is unknown, or one of its packages is not installed;
            a key is missing or wrong; or this Ray cluster already runs a TransferQueue.
        UnavailableError: Ray is not initialized, or the actors do not start in time.
    """
    _require_ray()
    backend = cfg["backend"]
    if backend not in BACKENDS:
        raise ConfigError(
            f"data-plane config: backend: found {backend!r}; expected one of {', '.join(BACKENDS)}"
        )
    BACKENDS[backend].check(cfg)
    settings = {**_DEFAULTS, **{key: cfg[key] for key in _STORE_KEYS if key in cfg}}  # type: ignore[literal-required]
    _check_used(BACKENDS[backend], settings)
    mirrored = settings["transfer_queue_mirror"]
    if not mirrored and (backend != "packed" or "sampler" in cfg):
        raise ConfigError(
            "data-plane config: transfer_queue_mirror: found False; expected True: only backend "
            "'packed' without the key sampler works without TransferQueue's controller"
        )
    sampler = ConsumptionSampler(load_sampler(cfg.get("sampler")))
    load_order(cfg.get("claim_order"))  # fail here rather than in the directory's process
    running = _call_ray(
        START_S, lambda: {name for name in (DIRECTORY, CONTROLLER) if _find(name) is not None}
    )
    if DIRECTORY in running:
        raise ConfigError(
            "this Ray cluster already runs a data plane; attach to it with bootstrap=False, or "
            "close the client that started it"
        )
    if mirrored and CONTROLLER in running:
        raise ConfigError(f"{_FOREIGN}; start the data plane in a separate Ray cluster")
    storage = BACKENDS[backend]()
    options = {"num_cpus": ACTOR_CPUS, "namespace": NAMESPACE}
    actors: dict[str, Any] = {}
    try:
        if mirrored:
            actors[CONTROLLER] = TransferQueueController.options(name=CONTROLLER, **options).remote(
                sampler=sampler, polling_mode=True
            )
        storage.start(cfg, NAMESPACE)
        units = storage.units if isinstance(storage, Packed) else []
        directory = (
            ray.remote(DirectoryActor)
            .options(name=DIRECTORY, **options)
            .remote(cfg["storage_capacity"], units, cfg.get("claim_order"), mirrored=mirrored)
        )
        actors[DIRECTORY] = directory
        controller = actors.get(CONTROLLER)
        address, zmq_info = ray.get(
            [
                directory.address.remote(),
                ray.put(None) if controller is None else controller.get_zmq_server_info.remote(),
            ],
            timeout=START_S,
        )
        connection = ConnectionData(backend, zmq_info, storage.connection, address, settings)
        actors.update(storage.actors)
        # The directory connects to packed units; all other actors connect to the directory.
        watched = storage.watched if isinstance(storage, Packed) else ()
        bound = {} if watched else dict(storage.actors)
        started = [directory.publish.remote([ray.put((connection, list(actors)))], *watched)]
        if controller is not None:
            bound[CONTROLLER] = controller
            started.append(controller.store_config.remote(_for_transfer_queue(connection)))
        started += [
            actor.__ray_call__.remote(bind_actor, address, name, START_S)
            for name, actor in bound.items()
        ]
        ray.get(started, timeout=START_S)
    except BaseException as error:  # an interrupt, too, must leave no actor behind
        for actor in actors.values():
            end_actor(actor)
        storage.stop()
        if isinstance(error, DataPlaneError) or not isinstance(error, RayError | ValueError):
            raise
        reason = reason_of(error) if isinstance(error, RayError) else error
        raise UnavailableError(
            f"TransferQueue did not start (deadline {START_S:g} s; each actor needs "
            f"{ACTOR_CPUS} CPU): {reason}"
        ) from error
    return Topology(actors, connection, storage)


def _check_used(backend: type[StorageBackend], settings: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if ``settings`` has a value that the backend would ignore."""
    for key in ("unit_resources", "packed_transport"):
        if settings[key] != _DEFAULTS[key] and key not in backend.options:
            users = ", ".join(name for name, each in BACKENDS.items() if key in each.options)
            raise ConfigError(
                f"data-plane config: {key}: found {settings[key]!r}, which backend "
                f"{settings['backend']!r} does not use; remove the key, or use one of {users}"
            )


def _for_transfer_queue(connection: ConnectionData) -> Any:
    """Return the configuration with which ``transfer_queue.init`` itself attaches."""
    config = OmegaConf.create({}, flags={"allow_objects": True})
    controller = {"polling_mode": True, "zmq_info": connection.controller}
    manager = BACKENDS[connection.backend].manager
    backend = {"storage_backend": manager, manager: connection.storage}
    if manager == "SimpleStorage":
        backend[manager] = {**defaults(manager), **connection.storage}
    # TransferQueue does not know the managers of this package.
    if StorageManagerFactory._registry[manager].__module__.startswith("dataplane_tq."):
        backend[manager] = {**connection.storage, "registration": Registration()}
    return OmegaConf.merge(config, {"controller": controller, "backend": backend})


def _call_ray(timeout_s: float, call: Callable[[], T]) -> T:
    """Call Ray with a deadline: Ray exceeds its own if one of its processes does not answer."""
    try:
        return call_within(timeout_s, call)
    except TimeoutError:
        raise UnavailableError(_SILENT.format(timeout_s)) from None


def attach(timeout_s: float) -> Topology:
    """Find the TransferQueue of this Ray cluster, waiting up to ``timeout_s`` for its start.

    Raises:
        UnavailableError: there is none after ``timeout_s``.
    """
    _require_ray()
    return _call_ray(timeout_s + _RAY_GRACE_S, lambda: _attach(timeout_s))


def _attach(timeout_s: float) -> Topology:
    deadline = time.monotonic() + timeout_s
    directory = _find(DIRECTORY)
    while True:
        if directory is not None:
            remaining = max(0.1, deadline - time.monotonic())
            try:
                published = ray.get(directory.connection_data.remote(), timeout=remaining)
                if published is not None:
                    return _attached(*ray.get(published[0], timeout=remaining))
            except GetTimeoutError:
                pass
            except RayError as error:
                raise UnavailableError(f"the partition directory is gone: {error}") from error
        if time.monotonic() >= deadline:
            if directory is None and _find(CONTROLLER) is not None:
                raise UnavailableError(f"{_FOREIGN}; clients of this package cannot attach to it")
            raise UnavailableError(
                f"no TransferQueue in this Ray cluster after {timeout_s:g} s; build a client with "
                "bootstrap=True on the driver first"
            )
        time.sleep(0.05)
        directory = directory or _find(DIRECTORY)


def _attached(connection: ConnectionData, names: list[str]) -> Topology:
    actors = {name: _find(name) for name in names}
    gone = [name for name, actor in actors.items() if actor is None]
    if gone:
        raise UnavailableError(f"TransferQueue is incomplete; gone actors: {', '.join(gone)}")
    return Topology(actors, connection)


def _find(name: str) -> Any:
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def _require_ray() -> None:
    if not ray.is_initialized():
        raise UnavailableError("Ray is not initialized in this process; call join_ray() first")
