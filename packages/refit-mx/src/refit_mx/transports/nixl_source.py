"""`NixlSource`: makes a publisher's arenas readable by NIXL."""

from __future__ import annotations

import threading
from typing import Any  # NIXL's agents have no types

import torch

from refit_mx.cuda_order import why_not_registered
from refit_mx.errors import RefitConfigError
from refit_mx.manifest import NixlAgent
from refit_mx.transports.nixl_library import new_agent


class NixlSource:
    """One NIXL agent for each arena.

    So what a manifest says of an agent never changes: NIXL takes changed metadata of a known agent
    for a new one and forgets what is under way. And with its agent an arena that was given up
    becomes unreadable, which deregistering alone does not achieve.

    Keep the source's `SourceServer` open for longer than this: that a process is gone is seen by
    its server being gone.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Any: agents and registrations are NIXL's own. The tensor keeps the memory alive.
        self._registered: dict[int, tuple[torch.Tensor, Any, Any]] = {}

    def register(self, memory: torch.Tensor) -> NixlAgent:
        """Make an arena readable.

        Args:
            memory: all of it, as one contiguous uint8 tensor of one axis; not registered yet.

        Raises:
            RefitConfigError: NIXL is missing, or the memory is registered or cannot be.
        """
        with self._lock:
            address = memory.data_ptr()
            if address in self._registered:
                raise RefitConfigError(f"the memory at {address:#x} is registered already")
            agent = new_agent("refit-source", serves=True)
            self._registered[address] = (memory, agent, register_memory(agent, memory))
            return NixlAgent(
                name=agent.name,
                metadata=agent.get_agent_metadata(),
                memory="DRAM" if memory.device.type == "cpu" else "VRAM",
                device_id=memory.device.index or 0,
            )

    def unregister(self, memory: torch.Tensor) -> None:
        """End the arena's agent: reads that are under way fail. Nothing if it has none."""
        with self._lock:
            found = self._registered.pop(memory.data_ptr(), None)
        if found is not None:
            _, agent, registration = found
            agent.deregister_memory(registration)

    def close(self) -> None:
        """End all agents. May be called again."""
        with self._lock:
            memories = [memory for memory, _, _ in self._registered.values()]
        for memory in memories:
            self.unregister(memory)


def register_memory(agent: Any, memory: torch.Tensor) -> Any:  # Any: NIXL has no types
    """NIXL's registration of a buffer.

    Raises:
        RefitConfigError: it is not one contiguous uint8 tensor of one axis, nobody could read it,
            or NIXL refuses it.
    """
    if memory.dtype != torch.uint8 or memory.dim() != 1 or not memory.is_contiguous():
        raise RefitConfigError(
            f"memory: {memory.dtype} {tuple(memory.shape)}; "
            "expected one contiguous uint8 tensor of one axis"
        )
    why = why_not_registered(memory.device)
    if why is not None:
        raise RefitConfigError(
            f"NIXL cannot serve {memory.numel()} bytes on {memory.device}: {why}"
        )
    try:
        return agent.register_memory(memory, backends=["UCX"])
    except Exception as error:  # noqa: BLE001 - NIXL's errors have no common base but Exception
        raise RefitConfigError(
            f"NIXL cannot register {memory.numel()} bytes on {memory.device}: {error!r}"
        ) from None
