"""The Ray actor around `Directory`: tells where it listens, and how clients connect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any  # Any: what clients connect by is TransferQueue's

import ray

from dataplane_core.ledger import load_order
from dataplane_tq.directory import Directory
from dataplane_tq.packed.catalogue import UnitSpec
from dataplane_tq.packed.unit_wire import UnitAddress
from dataplane_tq.wire import Address


class DirectoryActor:
    """Started by `dataplane_tq.topology`; its process imports neither torch nor TransferQueue.

    So it holds no handle of an actor whose class does: see `dataplane_tq.tether`.

    Args:
        capacity: samples that the store may hold.
        units: the packed backend's units.
        claim_order: as `DataPlaneConfig` has it.
    """

    def __init__(
        self, capacity: int, units: Sequence[UnitSpec], claim_order: str | None = None
    ) -> None:
        host = ray.util.get_node_ip_address()
        self._directory = Directory(capacity, units, host, load_order(claim_order))
        self._address = self._directory.start()
        self._facts: list[Any] | None = None

    def publish(
        self, facts: list[Any], units: Sequence[UnitAddress] = (), token: bytes = b""
    ) -> None:
        """Keep what clients connect by, and watch the packed backend's units from now on.

        Args:
            facts: one reference to it, which stays one: its types are TransferQueue's.
            units: to be watched; other actors are tied to the directory.
            token: the units'.
        """
        self._facts = facts
        self._directory.watch(units, token)

    def facts(self) -> list[Any] | None:
        """What `publish` was given, None before."""
        return self._facts

    def address(self) -> Address:
        """Where the directory listens."""
        return self._address
