"""`NixlSource`: makes a publisher's arenas readable over NIXL."""

from __future__ import annotations

import threading
from typing import Any  # NIXL's agents have no types

import torch

from refit_mx.errors import RefitConfigError
from refit_mx.manifest.format import NixlAgent
from refit_mx.memory.cuda import registration_obstacle
from refit_mx.transports.nixl_library import new_agent


class NixlSource:
    """NIXL agents of a publisher, one per arena.

    With one agent per arena, an agent's metadata never changes: NIXL would take changed metadata
    for a new agent, and forget reads in progress. Also, an arena becomes unreadable only when its
    agent ends; deregistering the memory is not enough.

    Close the source's `SourceServer` after this: a refused connection to it shows clients that the
    process is gone.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Any: agents and registrations have NIXL's types. The tensor keeps the memory alive.
        self._registered: dict[int, tuple[torch.Tensor, Any, Any]] = {}

    def register(self, memory: torch.Tensor) -> NixlAgent:
        """Make a complete arena readable through a new agent.

        Raises:
            RefitConfigError: NIXL is missing, or the memory is registered already or cannot be.
        """
        with self._lock:
            address = memory.data_ptr()
            if address in self._registered:
                raise RefitConfigError(f"the memory at {address:#x} is already registered")
            agent = new_agent("refit-source", serves=True)
            self._registered[address] = (memory, agent, register_memory(agent, memory))
            return NixlAgent(
                name=agent.name,
                metadata=agent.get_agent_metadata(),
                memory="DRAM" if memory.device.type == "cpu" else "VRAM",
                device_id=memory.device.index or 0,
            )

    def unregister(self, memory: torch.Tensor) -> None:
        """End the agent of an arena, if it has one: reads in progress fail."""
        with self._lock:
            entry = self._registered.pop(memory.data_ptr(), None)
        if entry is not None:
            _, agent, registration = entry
            agent.deregister_memory(registration)

    def close(self) -> None:
        """End all agents. May be called again."""
        with self._lock:
            memories = [memory for memory, _, _ in self._registered.values()]
        for memory in memories:
            self.unregister(memory)


def register_memory(agent: Any, memory: torch.Tensor) -> Any:  # Any: NIXL has no types
    """Register a buffer with NIXL and return the registration.

    Raises:
        RefitConfigError: the buffer is not a contiguous uint8 tensor of one axis, other processes
            could not read it, or NIXL refuses it.
    """
    if memory.dtype != torch.uint8 or memory.dim() != 1 or not memory.is_contiguous():
        raise RefitConfigError(
            f"memory: {memory.dtype} {tuple(memory.shape)}; "
            "expected one contiguous uint8 tensor of one axis"
        )
    why = registration_obstacle(memory.device)
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
