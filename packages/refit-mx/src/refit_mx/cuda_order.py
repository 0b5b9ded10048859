"""What CUDA's streams order, and what they do not: the memory that others read and write.

Reads of other processes and of network cards know nothing of streams, so kernels that use such
memory have to be over before it changes hands.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch

_ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def wait_for(devices: Iterable[torch.device]) -> None:
    """Wait until everything that was queued on them is done; nothing to wait for on a CPU."""
    for device in {device for device in devices if device.type == "cuda"}:
        torch.cuda.synchronize(device)


@contextmanager
def beside_others(device: torch.device) -> Iterator[None]:
    """Copies in the block wait for nothing that is queued on the device, such as training.

    What they copy has to be complete already.
    """
    if device.type != "cuda":
        yield
        return
    with torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
        yield


def why_not_registered(
    device: torch.device, environment: Mapping[str, str] = os.environ
) -> str | None:
    """Why NIXL cannot serve memory that torch allocates on a device; None if it can.

    Memory of expandable segments is mapped of several pieces. It can be registered, but network
    cards fail to read it, and other processes cannot map it.
    """
    if device.type != "cuda":
        return None
    for name in _ALLOCATOR_SETTINGS:
        settings = environment.get(name, "").replace(" ", "").lower().split(",")
        if "expandable_segments:true" in settings:
            return (
                f"{name} has expandable_segments:True, and neither network cards nor other "
                "processes can read memory that torch allocates so; leave it out in this process, "
                "or use the transport tcp"
            )
    return None
