"""The Ray actor around `Directory`: tells where it listens, and watches what it depends on."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any  # Any: Ray handles have no static types

import ray
from ray.exceptions import GetTimeoutError, RayActorError

from dataplane_core import UnavailableError
from dataplane_core.ledger import load_order
from dataplane_tq.directory import Directory
from dataplane_tq.packed.catalogue import UnitSpec
from dataplane_tq.packed.unit_wire import UnitAddress
from dataplane_tq.wire import Address

_PROBE_EVERY_S = 0.5
_PROBE_S = 1.0
_SWITCH_S = 0.0005


class DirectoryActor:
    """Started by `dataplane_tq.topology`; its process imports neither torch nor TransferQueue.

    Args:
        capacity: samples that the store may hold.
        units: the packed backend's units.
        claim_order: as `DataPlaneConfig` has it.
    """

    def __init__(
        self, capacity: int, units: Sequence[UnitSpec], claim_order: str | None = None
    ) -> None:
        # However much the server's thread has to do, the one that watches gets its turn.
        sys.setswitchinterval(_SWITCH_S)
        host = ray.util.get_node_ip_address()
        self._directory = Directory(capacity, units, host, load_order(claim_order))
        self._address = self._directory.start()
        self._facts: list[Any] | None = None

    def publish(
        self,
        facts: list[Any],
        actors: Mapping[str, Any],
        units: Sequence[UnitAddress] = (),
        token: bytes = b"",
    ) -> None:
        """Keep what clients connect by, and watch the actors that they depend on from now on.

        Args:
            facts: one reference to it, which stays one: its types are TransferQueue's.
            actors: name to handle.
            units: the packed backend's, which tell faster than Ray that they are gone.
            token: the units'.
        """
        self._facts = facts
        self._directory.watch(units, token)
        threading.Thread(target=self._watch, args=(dict(actors),), daemon=True).start()

    def facts(self) -> list[Any] | None:
        """What `publish` was given, None before."""
        return self._facts

    def address(self) -> Address:
        """Where the directory listens."""
        return self._address

    def _watch(self, actors: dict[str, Any]) -> None:
        """Fail every request as soon as a part is dead, so that none waits for it."""
        pause = threading.Event()
        while not pause.wait(_PROBE_EVERY_S):
            dead = first_dead(actors)
            if dead is not None:
                self._directory.fail(UnavailableError(dead))
                return


def first_dead(actors: Mapping[str, Any]) -> str | None:
    """A sentence about the first actor that Ray knows to be dead; None if there is none."""
    if not ray.is_initialized():
        return "Ray has ended in this process"  # to ask would start another
    probes = {}
    for name, actor in actors.items():
        try:
            probes[name] = actor.__ray_ready__.remote()
        except Exception as error:  # noqa: BLE001  # Ray has no type for a handle of an earlier Ray
            return f"{name} is gone: {first_line(error)}"
    ready, _ = ray.wait(list(probes.values()), num_returns=len(probes), timeout=_PROBE_S)
    for name, probe in probes.items():
        if probe in ready:
            try:
                ray.get(probe, timeout=_PROBE_S)
            except RayActorError as error:
                return f"{name} is dead: {first_line(error)}"
            except GetTimeoutError:
                continue
    return None


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its type."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
