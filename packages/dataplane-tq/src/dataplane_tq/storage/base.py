"""`StorageBackend`: interface between the bootstrap and a storage backend of TransferQueue.

A backend belongs to the process that started it. Every other process needs only `connection`, and
the names in `actors` to detect that a part died. An actor that owns a daemon dies with it. A
backend without actors leaves `actors` empty, and overrides `stop` if it holds anything else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from typing import (
    Any,
    ClassVar,
)  # Any: Ray handles and TransferQueue's options have no static types

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from dataplane_core import ConfigError, DataPlaneConfig, DataPlaneError, UnavailableError
from dataplane_core.deadlines import call_within
from dataplane_tq.ray_errors import reason_of

ACTOR_CPUS = 0.1
"""Ray CPUs that each actor reserves.

The actors are mostly idle; one CPU for each would leave none to a small machine's workers.
"""

START_S = 120.0
"""Deadline of each step of a start, in seconds."""

_KILL_S = 5.0
_BUILT_IN_RESOURCES = ("CPU", "GPU", "memory", "object_store_memory")


class StorageBackend(ABC):
    """Storage backend, started once per TransferQueue.

    An owner that exits without closing its client calls no method: Ray ends its actors, and a
    backend must arrange that anything else ends too, for example by ``weakref.finalize``.

    Attributes:
        manager: the storage manager's name in TransferQueue's registry.
        rows_as_bytes: whether each row is stored as ``bytes``, because the backend changes or
            refuses some tensors. The backend then receives encoded rows with checksums, and never
            a tensor.
        survivable: whether clients detect the death of each part within seconds. False if the
            backend's library blocks a client of a dead daemon until the deadline.
        options: optional configuration keys that this backend uses, but not every backend.
        actors: name to Ray handle of every actor that operations depend on; set by `start`.
        connection: the ``config`` of ``initialize_storage_manager`` in every process; picklable,
            set by `start`.
    """

    manager: ClassVar[str]
    rows_as_bytes: ClassVar[bool] = False
    survivable: ClassVar[bool] = True
    options: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        self.actors: dict[str, Any] = {}
        self.connection: dict[str, Any] = {}

    @classmethod
    @abstractmethod
    def check(cls, cfg: DataPlaneConfig) -> None:
        """Raise `ConfigError` if a package is not installed, or a key is missing or wrong."""

    @abstractmethod
    def start(self, cfg: DataPlaneConfig, namespace: str) -> None:
        """Start the actors and wait until they answer.

        After any exception the caller calls `stop`, which ends what was started.

        Args:
            cfg: configuration that `check` accepted.
            namespace: Ray namespace of the named actors.

        Raises:
            ConfigError: the Ray cluster or this machine does not suit the backend.
            UnavailableError: a part did not start.
        """

    @classmethod
    def bounded(cls, connection: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Bound the waits of the backend's library in this process, before it connects.

        Args:
            connection: `connection` of the started backend.
            timeout_s: deadline of one call, in seconds.

        Returns:
            The ``config`` of ``initialize_storage_manager``.

        Raises:
            UnavailableError: a part is gone.
            DeadlineExceededError: a part does not answer.
        """
        return connection

    def stop(self) -> None:
        """Kill every actor; the data in their memory is lost."""
        for actor in self.actors.values():
            end_actor(actor)
        self.actors = {}


@dataclass(frozen=True)
class Registration:
    """Marker without data in the TransferQueue configuration of a data plane.

    Unpickling it imports `dataplane_tq.storage`, which registers the storage managers of this
    package in a process that only calls ``transfer_queue.init()``.
    """


def end_actor(actor: Any) -> None:
    """Kill an actor, unless its Ray cluster was shut down already or does not answer."""
    if ray.is_initialized():  # `ray.kill` would start a Ray cluster
        # A handle of an earlier cluster raises a ValueError.
        with suppress(RayError, ValueError, TimeoutError):
            call_within(_KILL_S, lambda: ray.kill(actor))


def require_module(module: str, *, backend: str, extra: str, pythons: str) -> None:
    """Raise a `ConfigError` with ``extra`` and ``pythons`` if ``module`` is not installed."""
    try:
        spec = find_spec(module)
    except ModuleNotFoundError:  # a parent package is missing
        spec = None
    if spec is None:
        raise ConfigError(
            f"data-plane config: backend {backend!r} needs the module {module!r}, which is not "
            f"installed; it comes with the extra dataplane-tq[{extra}], on Python {pythons}"
        )


def require_bytes(cfg: DataPlaneConfig, key: str, *, backend: str, min_bytes: int) -> None:
    """Raise `ConfigError` if the size ``cfg[key]`` is missing or below ``min_bytes``."""
    size = dict(cfg).get(key)
    if not isinstance(size, int) or size < min_bytes:
        raise ConfigError(
            f"data-plane config: {key}: found {size!r}; backend {backend!r} needs at least "
            f"{min_bytes} bytes"
        )


def require_resources(cfg: DataPlaneConfig) -> None:
    """Raise `ConfigError` if the nodes have too little of a resource for all storage units."""
    available = ray.cluster_resources() if ray.is_initialized() else {}
    for name, amount in cfg.get("unit_resources", {}).items():
        what = f"data-plane config: unit_resources.{name}: found {amount!r}; "
        if name in _BUILT_IN_RESOURCES:
            raise ConfigError(f"{what}expected a custom resource of Ray's nodes")
        if not amount > 0:
            raise ConfigError(f"{what}expected more than 0")
        if available.get(name, 0.0) < amount * cfg["num_storage_units"]:
            raise ConfigError(
                f"{what}{cfg['num_storage_units']} units need {amount * cfg['num_storage_units']:g}"
                f" of it, but this Ray cluster has {available.get(name, 0.0):g}"
            )


def collect_results(
    what: str, calls: Mapping[str, Any], *, timeout_s: float = START_S
) -> dict[str, Any]:
    """Return the results of actor calls by name.

    Args:
        what: the backend, for error messages.
        calls: name to object reference.
        timeout_s: deadline of all calls together, in seconds.

    Raises:
        UnavailableError: a call failed or did not finish in time.
    """
    try:
        return dict(zip(calls, ray.get(list(calls.values()), timeout=timeout_s), strict=True))
    except GetTimeoutError:
        raise UnavailableError(
            f"{what}: {', '.join(calls)} did not answer within {timeout_s:g} s; Ray needs free "
            f"CPUs to start them, found {ray.available_resources().get('CPU', 0.0):g}"
        ) from None
    except RayTaskError as error:
        if isinstance(error.cause, DataPlaneError):
            raise error.cause from None
        raise UnavailableError(f"{what} did not start: {reason_of(error)}") from error
    except RayError as error:
        raise UnavailableError(f"{what} did not start: {reason_of(error)}") from error
