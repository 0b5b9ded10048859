"""A connection that an actor keeps to the directory, and that ends with the actor's process.

So the directory notices a dead actor without a handle of it. With a handle Ray would import the
actor's class, TransferQueue and torch with it, into the directory's process: seconds of processor
time at each start, and 320 MB.
"""

from __future__ import annotations

from typing import Any  # Any: the actor's own class

from dataplane_tq import protocol as p
from dataplane_tq.wire import Address, Link

_held: list[Link] = []


def tie(actor: Any, address: Address, name: str, timeout_s: float) -> None:
    """Connect this process to the directory until it ends; called by ``actor.__ray_call__``.

    Args:
        actor: which nothing is done with.
        address: of the directory.
        name: of the actor, for errors.
        timeout_s: for the directory's answer, in seconds.

    Raises:
        UnavailableError: the directory is gone.
        DeadlineExceededError: it does not answer.
    """
    link = Link(address, timeout_s=timeout_s)
    link.ask(f"tie {name} to the directory", p.Tie(name), type(None))
    _held.append(link)
