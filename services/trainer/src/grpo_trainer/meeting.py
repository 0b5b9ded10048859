"""How the data-parallel ranks of the policy find each other, on whichever machines they are."""

from __future__ import annotations

import datetime
import socket
from typing import Any  # Any: mypy sees no stores in torch.distributed

import torch.distributed as dist

from grpo_trainer.node_address import keep_to_own_interface, node_address


def open_meeting(world: int, *, timeout_s: float) -> Any:
    """Hold the store in which the ranks find each other; it listens on this machine's address.

    Only the address by which Ray knows the machine is listened on, at a port that is free.

    Args:
        world: number of ranks.
        timeout_s: for whatever one rank waits for of another, in seconds.
    """
    host = node_address()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, 0), family=family)
    port = listening.getsockname()[1]
    return _store(
        host,
        port,
        world,
        timeout_s,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )


def find_meeting(host: str, port: int, world: int, *, timeout_s: float) -> Any:
    """A connection to the store that another rank holds there."""
    return _store(host, port, world, timeout_s, is_master=False)


def _store(host: str, port: int, world: int, timeout_s: float, **how: Any) -> Any:
    timeout = datetime.timedelta(seconds=timeout_s)
    return dist.TCPStore(host, port, world, timeout=timeout, **how)  # type: ignore[attr-defined]


def join_meeting(store: Any, *, backend: str, rank: int, world: int, timeout_s: float) -> None:
    """Become a rank; returns when all have.

    Args:
        store: of `open_meeting` or `find_meeting`.
        backend: of torch.distributed.
        rank: of this process.
        world: number of ranks.
        timeout_s: of each collective operation, in seconds.
    """
    keep_to_own_interface()
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
