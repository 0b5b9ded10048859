"""Rendezvous of the policy's data-parallel ranks, on one machine or several."""

from __future__ import annotations

import datetime
import socket
from typing import Any  # Any: mypy sees no stores in torch.distributed

import torch
import torch.distributed as dist

from grpo_trainer.actors.address import bind_to_node_interface, node_address


def host_store(world: int, *, timeout_s: float) -> Any:
    """Host the store of ``world`` ranks on this machine's Ray address, at a free port.

    ``timeout_s`` is the deadline of each operation on it.
    """
    host = node_address()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family)
    port = listener.getsockname()[1]
    # The store takes over the listening socket, so that no other process can take the port.
    options = {"is_master": True, "wait_for_workers": False, "master_listen_fd": listener.detach()}
    return connect_store(host, port, world, timeout_s=timeout_s, **options)


def connect_store(host: str, port: int, world: int, *, timeout_s: float, **options: Any) -> Any:
    """Return a client of the ranks' store; ``options`` can make this process its host."""
    timeout = datetime.timedelta(seconds=timeout_s)
    return dist.TCPStore(host, port, world, timeout=timeout, **options)  # type: ignore[attr-defined]


def join_process_group(
    store: Any, *, backend: str, rank: int, world: int, timeout_s: float
) -> None:
    """Join as a rank, and return once all have joined.

    ``timeout_s`` is the deadline of each collective operation.
    """
    bind_to_node_interface()
    timeout = datetime.timedelta(seconds=timeout_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)


def leave_process_group() -> None:
    """Leave the process group, if any; operations of other ranks with this process then fail."""
    if dist.is_initialized():
        dist.destroy_process_group()


def share_state(model: Any, optimizer: Any) -> None:
    """Copy the model and the state of its AdamW from rank 0 to all other ranks."""
    device = next(model.parameters()).device
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, 0)
    has_state = torch.tensor(float(bool(optimizer.state)), device=device)
    dist.broadcast(has_state, 0)
    if not has_state:  # no step was completed
        optimizer.state.clear()
        return
    for parameter in filter(lambda each: each.requires_grad, model.parameters()):
        state = optimizer.state[parameter]
        step = state.get("step", torch.tensor(0.0)).to(device)
        dist.broadcast(step, 0)
        state["step"] = step.cpu()
        for name in ("exp_avg", "exp_avg_sq"):
            state.setdefault(name, torch.zeros_like(parameter))
            dist.broadcast(state[name], 0)
