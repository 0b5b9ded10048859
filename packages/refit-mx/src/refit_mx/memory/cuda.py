"""Ordering between CUDA streams and other readers and writers of the same memory.

Other processes and network cards ignore streams, so kernels that use this memory must finish before
another reader or writer uses it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch

_ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def synchronize(devices: Iterable[torch.device]) -> None:
    """Wait until all work queued on the devices is done; a CPU has none."""
    for device in {device for device in devices if device.type == "cuda"}:
        torch.cuda.synchronize(device)


@contextmanager
def on_separate_stream(device: torch.device) -> Iterator[None]:
    """Run the block's copies without waiting for work queued on the device, such as training.

    The data that they copy must be complete already. Copies between the device and the host are
    complete when the block ends, others may not be.
    """
    if device.type != "cuda":
        yield
        return
    with torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
        yield


def registration_obstacle(
    device: torch.device, environment: Mapping[str, str] = os.environ
) -> str | None:
    """Return why NIXL cannot serve memory that torch allocates on a device; None if it can.

    Memory in expandable segments consists of several mappings. It can be registered, but network
    cards fail to read it, and other processes cannot map it.
    """
    if device.type != "cuda":
        return None
    for name in _ALLOCATOR_SETTINGS:
        settings = environment.get(name, "").replace(" ", "").lower().split(",")
        if "expandable_segments:true" in settings:
            return (
                f"{name} has expandable_segments:True, and neither network cards nor other "
                "processes can read memory allocated in such segments; remove it for this process, "
                "or use the transport tcp"
            )
    return None
