"""Process that joins a Ray cluster and reads its TransferQueue for a `QueueInspector`.

When a cluster ends, Ray ends every process that has joined it. So the inspector's process does not
join; it starts this one. The two exchange msgpack over a socket. This process ends when its parent
closes the socket or dies.
"""

from __future__ import annotations

import sys
import time
from multiprocessing.connection import Connection
from typing import Any  # Any: Ray handles, and msgpack values

import msgspec
import ray
from ray import cloudpickle
from ray.exceptions import GetTimeoutError, RayError

from dataplane_core import ConfigError, DataPlaneError, StorageSummary, UnavailableError
from dataplane_tq.actor_names import CONTROLLER, DIRECTORY, NAMESPACE
from dataplane_tq.any_queue import remote_reads
from dataplane_tq.directory import protocol as p
from dataplane_tq.directory.wire import Failure, Link, Reply
from dataplane_tq.local_ray import join_ray
from dataplane_tq.ray_errors import reason_of

_PACKED = "PackedStorage"
_POLL_S = 0.1


class QueueReader:
    """Reader of the TransferQueue of the Ray cluster that this process has joined.

    Args:
        timeout_s: deadline of one query, in seconds.

    Raises:
        ConfigError: the TransferQueue belongs to a data plane of this package.
        UnavailableError: after ``timeout_s`` the cluster runs no TransferQueue, or one older than
            0.1.8.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        deadline = time.monotonic() + timeout_s
        while True:
            self._controller = _find(CONTROLLER)
            if _find(DIRECTORY) is not None:
                raise ConfigError(
                    f"this Ray cluster runs a data plane of dataplane-tq: there is an actor "
                    f"{DIRECTORY}; attach a client to it"
                )
            if self._controller is not None or time.monotonic() >= deadline:
                break
            time.sleep(_POLL_S)
        if self._controller is None:
            others = [
                actor["namespace"]
                for actor in ray.util.list_named_actors(all_namespaces=True)
                if actor["name"] == CONTROLLER and actor["namespace"] != NAMESPACE
            ]
            raise UnavailableError(
                f"the TransferQueue of namespace {others[0]!r} is older than 0.1.8 and cannot be "
                "read; update it"
                if others
                else f"this Ray cluster runs no TransferQueue: there is no actor {CONTROLLER}"
            )
        self._units: dict[str, Any] | None = None
        self._packed: Link | None = None

    def read(self, name: str, *arguments: Any) -> Any:
        """Call a function of `remote_reads` with the controller, in the controller's process."""
        function = getattr(remote_reads, name)
        return self._results([self._controller.__ray_call__.remote(function, *arguments)])[0]

    def list_storage(self) -> list[StorageSummary]:
        """Return the storage units; an empty list if the backend is not SimpleStorage or packed."""
        if self._units is None and self._packed is None:
            self._find_units()
        if self._packed is not None:
            return self._packed.ask("list_storage", p.ListStorage(), list[StorageSummary])
        units = self._units or {}
        try:
            read = self._results(
                [unit.__ray_call__.remote(remote_reads.read_unit) for unit in units.values()]
            )
        except UnavailableError:
            self._units = None  # find them again
            raise
        return [
            StorageSummary(
                name=name,
                node=unit["node"],
                capacity=None,
                used=unit["resident"],
                free=None,
                samples=unit["samples"],
                max_samples=unit["limit"],
            )
            for name, unit in zip(units, read, strict=True)
        ]

    def _find_units(self) -> None:
        config = self.read("read_config")
        if config is None:
            return  # the queue is starting
        if config["backend"] == _PACKED:
            (full,) = self._results([self._controller.get_config.remote()])
            address = full.backend[_PACKED].raw.directory
            self._packed = Link(address, timeout_s=self._timeout_s)
            return
        try:
            named = {
                actor["name"]: actor["namespace"]
                for actor in ray.util.list_named_actors(all_namespaces=True)
            }
            self._units = {
                name: ray.get_actor(name, namespace=named[name])
                for name in config["units"]
                if name in named
            }
        except (ValueError, RayError) as error:  # an actor that is ending has no handle
            raise UnavailableError(f"TransferQueue cannot be read: {reason_of(error)}") from None

    def _results(self, references: list[Any]) -> list[Any]:
        try:
            return list(ray.get(references, timeout=self._timeout_s))
        except GetTimeoutError:
            raise UnavailableError(
                f"TransferQueue did not answer within {self._timeout_s:g} s"
            ) from None
        except RayError as error:
            raise UnavailableError(f"TransferQueue cannot be read: {reason_of(error)}") from None


def _find(name: str) -> Any:
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def serve(connection: Connection, address: str, timeout_s: float) -> None:
    """Join a cluster, then answer requests until the parent closes the connection."""
    # The actors' processes may lack this package.
    cloudpickle.register_pickle_by_value(remote_reads)
    reader: QueueReader | None = None

    def answer(method: str, arguments: list[Any]) -> Any:
        nonlocal reader
        if reader is None:
            _join(address)
            reader = QueueReader(timeout_s)
        return (
            reader.list_storage() if method == "list_storage" else reader.read(method, *arguments)
        )

    while True:
        try:
            method, arguments = msgspec.msgpack.decode(connection.recv_bytes())
        except (EOFError, OSError):
            return
        try:
            reply = Reply(msgspec.Raw(msgspec.msgpack.encode(answer(method, arguments))))
        except DataPlaneError as error:
            reply = Reply(failure=Failure.of(error))
        connection.send_bytes(msgspec.msgpack.encode(reply))


def _join(address: str) -> None:
    try:
        join_ray(address, namespace="dataplane-reader", logging_level="ERROR", log_to_driver=False)
    except (RuntimeError, OSError, ValueError, OverflowError) as error:
        text = " ".join(str(error).split())
        raise UnavailableError(f"no Ray cluster at {address!r}: {text}") from None


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])), sys.argv[2], float(sys.argv[3]))
