"""The Ray actor around a storage unit; its process imports no torch."""

from __future__ import annotations

import ray

from dataplane_tq.packed.arena import Arena
from dataplane_tq.packed.unit import UnitServer
from dataplane_tq.packed.unit_wire import UnitAddress


class UnitActor:
    """Owns ``nbytes`` of memory until it ends, however it ends.

    Args:
        name: of the unit.
        nbytes: size of its memory; pages are taken as they are first written.
        token: what clients must know.
    """

    def __init__(self, name: str, nbytes: int, token: bytes) -> None:
        self._arena = Arena.create(name, nbytes)
        self._server = UnitServer(self._arena, token, ray.util.get_node_ip_address())

    def describe(self) -> tuple[UnitAddress, str]:
        """How to reach the unit, and the node it runs on."""
        return self._server.address, ray.get_runtime_context().get_node_id()
