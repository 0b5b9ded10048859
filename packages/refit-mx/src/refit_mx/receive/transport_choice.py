"""`Transports`: the transport that reads from a set of sources, with its scratch memory."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from refit_mx.errors import RefitConfigError
from refit_mx.manifest.format import Manifest
from refit_mx.memory.mapping import shared_memory_missing
from refit_mx.receive.scratch import ScratchPool
from refit_mx.settings import ReceiverSettings
from refit_mx.transports.base import Transport
from refit_mx.transports.nixl_library import has_rdma, nixl_obstacle
from refit_mx.transports.shm import ShmTransport, can_map
from refit_mx.transports.tcp import TcpTransport

NIXL_RETRY_S = 300.0
"""Time for which TCP replaces NIXL after a failure. Where NIXL never works, each retry of it wastes
an attempt; where it failed only once, TCP is slower for that long."""


class Transports:
    """The transports of one receiver, created on first use.

    Arguments are those of `refit_mx.receive.receiving.Receiving`.

    Raises:
        RefitConfigError: the transport is unknown or not available.
    """

    def __init__(
        self,
        transport: Transport | str,
        *,
        max_scratch_bytes: int,
        device: torch.device,
        settings: ReceiverSettings,
    ) -> None:
        self._max_scratch_bytes = max_scratch_bytes
        self._device = device
        self._settings = settings
        self._open: dict[str, Transport] = {}
        self._pools: dict[str, ScratchPool] = {}
        self._tcp_until: dict[str, float] = {}
        self._given = None if isinstance(transport, str) else transport
        self._wanted = transport if isinstance(transport, str) else transport.name
        if self._given is not None:
            self._open[self._wanted] = self._given
        elif self._wanted not in ("nixl", "shm", "tcp", "auto"):
            raise RefitConfigError(f"transport {self._wanted!r}; expected nixl, shm, tcp or auto")
        why = self._unusable(self._wanted) if self._given is None else None
        if why is not None:
            raise RefitConfigError(f"transport {self._wanted!r}: {why}")

    def for_sources(self, used: Sequence[Manifest]) -> tuple[Transport, ScratchPool]:
        """Return the transport for the given sources, with its scratch memory.

        It closes the other transports, except those with memory in quarantine.

        Raises:
            RefitConfigError: NIXL is configured, and a source has none.
        """
        name = self._name_for(used)
        # Each pool may use the complete limit, and an unused transport keeps the memory of its
        # sources mapped.
        self._close_transports(
            [
                other
                for other in self._open
                if other != name
                and (other not in self._pools or not self._pools[other].has_quarantined)
            ]
        )
        if name not in self._open:
            self._open[name] = self._new(name)
        transport = self._open[name]
        if name not in self._pools:
            self._pools[name] = ScratchPool(
                transport, max_bytes=self._max_scratch_bytes, device=str(self._device)
            )
        return transport, self._pools[name]

    def can_fall_back_to_tcp(self, transport: Transport) -> bool:
        """Return whether `fall_back_to_tcp` would change how sources of this transport are read."""
        return self._wanted == "auto" and transport.name == "nixl"

    def fall_back_to_tcp(self, sources: Sequence[Manifest]) -> None:
        """Read sources over TCP for a while, since NIXL cannot read from their agents.

        This lasts `NIXL_RETRY_S`, and longer while abandoned NIXL reads from them are in progress.
        """
        now = time.monotonic()
        self._tcp_until = {name: until for name, until in self._tcp_until.items() if until > now}
        for source in sources:
            if source.nixl is not None:
                self._tcp_until[source.nixl.name] = now + NIXL_RETRY_S

    def close(self) -> None:
        """Disconnect and free the memory. May be called again."""
        self._close_transports(list(self._open))

    def _name_for(self, used: Sequence[Manifest]) -> str:
        without = [manifest.worker_id for manifest in used if manifest.nixl is None]
        if self._wanted == "auto":
            if self._unusable("shm") is None and all(map(can_map, used)):
                return "shm"
            unreadable = without or self._unusable("nixl") is not None or self._stuck(used)
            return "tcp" if unreadable or self._is_slow_over_nixl(used) else "nixl"
        if self._wanted == "nixl" and without:
            raise RefitConfigError(
                f"transport 'nixl': {len(without)} of {len(used)} sources have no NIXL, "
                f"such as {without[0]}; use 'auto' or 'tcp'"
            )
        return self._wanted

    def _is_slow_over_nixl(self, used: Sequence[Manifest]) -> bool:
        """Return whether UCX would copy a GPU's memory without RDMA, a tenth as fast as TCP."""
        sources = {manifest.nixl.memory for manifest in used if manifest.nixl is not None}
        return (self._device.type != "cpu" or "VRAM" in sources) and not has_rdma()

    def _stuck(self, used: Sequence[Manifest]) -> bool:
        """Return whether NIXL is known to be unable to read from one of the sources."""
        from refit_mx.transports.nixl import NixlTransport
        from refit_mx.transports.nixl_lane import abandoned_connects

        nixl, now = self._open.get("nixl"), time.monotonic()
        avoided = {name for name, until in self._tcp_until.items() if until > now}
        avoided |= abandoned_connects()
        return any(
            (source.nixl is not None and source.nixl.name in avoided)
            or (isinstance(nixl, NixlTransport) and nixl.is_stuck(source))
            for source in used
        )

    def _close_transports(self, names: Sequence[str]) -> None:
        """Close transports and their scratch memory; memory in use is freed on its release."""
        for name in names:
            pool, transport = self._pools.pop(name, None), self._open.pop(name)
            if pool is not None:
                pool.close()
            if transport is not self._given:
                transport.close()

    def _unusable(self, name: str) -> str | None:
        """Return why this receiver cannot use a transport at all; None if it can."""
        if name == "shm":
            return shared_memory_missing()
        return nixl_obstacle() if name == "nixl" else None

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
