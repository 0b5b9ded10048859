"""`Transports`: which transport reads from some sources, and its scratch memory."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from refit_mx.errors import RefitConfigError
from refit_mx.manifest import Manifest
from refit_mx.scratch import ScratchPool
from refit_mx.settings import ReceiverSettings
from refit_mx.shared_memory import shared_memory_missing
from refit_mx.transports.base import Transport
from refit_mx.transports.nixl_library import nixl_available
from refit_mx.transports.shm import ShmTransport, reaches
from refit_mx.transports.tcp import TcpTransport

NIXL_AGAIN_S = 300.0
"""For which an agent that could not be read over NIXL is read over TCP: where NIXL never works
between two hosts, each further try costs an attempt; where it failed once, TCP costs speed."""


class Transports:
    """Of one receiver; made when they are first used.

    Args:
        transport: ``nixl``, ``shm``, ``tcp``, ``auto`` or one that the caller closes.
        most_scratch_bytes: of all scratch memory of one transport.
        device: of the scratch memory.
        settings: time limits and bounds.

    Raises:
        RefitConfigError: an unknown transport, or one that cannot be used here.
    """

    def __init__(
        self,
        transport: Transport | str,
        *,
        most_scratch_bytes: int,
        device: torch.device,
        settings: ReceiverSettings,
    ) -> None:
        self._most_scratch_bytes = most_scratch_bytes
        self._device = device
        self._settings = settings
        self._made: dict[str, Transport] = {}
        self._pools: dict[str, ScratchPool] = {}
        self._over_tcp_until: dict[str, float] = {}
        self._given = None if isinstance(transport, str) else transport
        self._wanted = transport if isinstance(transport, str) else transport.name
        if self._given is not None:
            self._made[self._wanted] = self._given
        elif self._wanted not in ("nixl", "shm", "tcp", "auto"):
            raise RefitConfigError(f"transport {self._wanted!r}; expected nixl, shm, tcp or auto")
        why = self._unusable(self._wanted) if self._given is None else None
        if why is not None:
            raise RefitConfigError(f"transport {self._wanted!r}: {why}")

    def that_reads(self, used: Sequence[Manifest]) -> tuple[Transport, ScratchPool]:
        """One for all of some sources; others and their memory are given up.

        Raises:
            RefitConfigError: it was to be NIXL, and some of them have none.
        """
        name = self._name_for(used)
        # Scratch memory is bounded as a whole, and what the others hold of sources would stay.
        self._leave(
            [
                other
                for other in self._made
                if other != name
                and (other not in self._pools or not self._pools[other].counts().quarantined)
            ]
        )
        if name not in self._made:
            self._made[name] = self._new(name)
        transport = self._made[name]
        if name not in self._pools:
            self._pools[name] = ScratchPool(
                transport, most_bytes=self._most_scratch_bytes, device=str(self._device)
            )
        return transport, self._pools[name]

    def may_use_tcp_instead_of(self, transport: Transport) -> bool:
        """Whether `read_over_tcp` changes how sources are read that this transport has read."""
        return self._wanted == "auto" and transport.name == "nixl"

    def read_over_tcp(self, sources: Sequence[Manifest]) -> None:
        """NIXL cannot read from the agents of sources: leave it for a while, and for as long as it
        cannot disconnect from them."""
        now = time.monotonic()
        self._over_tcp_until = {
            name: until for name, until in self._over_tcp_until.items() if until > now
        }
        for source in sources:
            if source.nixl is not None:
                self._over_tcp_until[source.nixl.name] = now + NIXL_AGAIN_S

    def close(self) -> None:
        """Disconnect and free the memory. May be called again."""
        self._leave(list(self._made))

    def _name_for(self, used: Sequence[Manifest]) -> str:
        without = [manifest.worker_id for manifest in used if manifest.nixl is None]
        if self._wanted == "auto":
            if self._shares(used):
                return "shm"
            unread = without or self._unusable("nixl") is not None or self._stuck(used)
            return "tcp" if unread else "nixl"
        if self._wanted == "nixl" and without:
            raise RefitConfigError(
                f"transport 'nixl': {len(without)} of {len(used)} sources have no NIXL, "
                f"such as {without[0]}; use 'auto' or 'tcp'"
            )
        return self._wanted

    def _stuck(self, used: Sequence[Manifest]) -> bool:
        """Whether NIXL cannot read from one of the sources, as far as is known."""
        from refit_mx.transports.nixl import NixlTransport
        from refit_mx.transports.nixl_lane import abandoned_connects

        nixl, now = self._made.get("nixl"), time.monotonic()
        avoided = {name for name, until in self._over_tcp_until.items() if until > now}
        avoided |= abandoned_connects()
        return any(
            (source.nixl is not None and source.nixl.name in avoided)
            or (isinstance(nixl, NixlTransport) and nixl.is_stuck(source))
            for source in used
        )

    def _leave(self, names: Sequence[str]) -> None:
        """Give up transports and their scratch memory; what is in use is freed when it is back."""
        for name in names:
            pool, transport = self._pools.pop(name, None), self._made.pop(name)
            if pool is not None:
                pool.close()
            if transport is not self._given:
                transport.close()

    def _shares(self, used: Sequence[Manifest]) -> bool:
        """Whether all of the sources' memory can be mapped here."""
        return self._unusable("shm") is None and all(map(reaches, used))

    def _unusable(self, name: str) -> str | None:
        """Why this receiver cannot use a transport, whatever the sources; None if it can."""
        if name == "shm":
            if self._device.type != "cpu":
                return f"the scratch memory is on {self._device}; expected it on the CPU"
            return shared_memory_missing()
        return nixl_available() if name == "nixl" else None

    def _new(self, name: str) -> Transport:
        if name == "nixl":
            from refit_mx.transports.nixl import NixlTransport

            return NixlTransport(connect_timeout_s=self._settings.connect_timeout_s)
        if name == "shm":
            return ShmTransport(connect_timeout_s=self._settings.connect_timeout_s)
        return TcpTransport(
            connect_timeout_s=self._settings.connect_timeout_s,
            connections_per_source=self._settings.connections_per_source,
        )
