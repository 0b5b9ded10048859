"""The Ray actor that hosts `Directory` and publishes how clients connect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any  # Any: the connection data is TransferQueue's

import ray

from dataplane_core.ledger import load_order
from dataplane_tq.directory import protocol as p
from dataplane_tq.directory.server import Directory
from dataplane_tq.directory.wire import Address, Link
from dataplane_tq.packed.unit_wire import UnitAddress, UnitSpec


class DirectoryActor:
    """Ray actor of the directory.

    Its process imports neither torch nor TransferQueue. It therefore holds no handle of an actor
    whose class imports them: see `bind_actor`.

    Args:
        claim_order: ``claim_order`` of `DataPlaneConfig`. The other arguments are those of
            `StoreState`.
    """

    def __init__(
        self,
        capacity: int,
        units: Sequence[UnitSpec],
        claim_order: str | None = None,
        *,
        mirrored: bool = True,
    ) -> None:
        host = ray.util.get_node_ip_address()
        self._directory = Directory(
            capacity, units, host, load_order(claim_order), mirrored=mirrored
        )
        self._address = self._directory.start()
        self._connection: list[Any] | None = None

    def publish(
        self, connection: list[Any], units: Sequence[UnitAddress] = (), token: bytes = b""
    ) -> None:
        """Store the connection data for clients, and start watching the packed backend's units.

        Args:
            connection: a list with one Ray reference to the connection data, or an empty list. The
                reference is never resolved here: the types of the data would import TransferQueue.
            units: units to watch. Other actors connect to the directory: see `bind_actor`.
            token: secret to send to the units.
        """
        self._connection = connection
        self._directory.watch(units, token)

    def connection_data(self) -> list[Any] | None:
        """Return the published connection data; None before `publish`."""
        return self._connection

    def address(self) -> Address:
        """Return the address on which the directory listens."""
        return self._address


_held: list[Link] = []


def bind_actor(actor: Any, address: Address, name: str, timeout_s: float) -> None:
    """Connect this actor's process to the directory for the rest of its life.

    Called by ``actor.__ray_call__``. The connection closes with the process, so the directory
    detects a dead actor without holding a handle of it. With a handle, Ray would import the actor's
    class, TransferQueue and torch into the directory's process: seconds of processor time at each
    start, and 320 MB.

    Args:
        actor: unused; ``__ray_call__`` passes it.
        address: address of the directory.
        name: name of the actor, for errors.
        timeout_s: deadline of the directory's answer, in seconds.

    Raises:
        UnavailableError: the directory is gone.
        DeadlineExceededError: the directory does not answer.
    """
    link = Link(address, timeout_s=timeout_s)
    link.ask(f"bind {name} to the directory", p.BindActor(name), type(None))
    _held.append(link)
