"""Which transports a publisher offers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from refit_mx.errors import RefitConfigError
from refit_mx.shared_memory import shared_memory_missing
from refit_mx.transports.nixl_library import nixl_available


def offered_transports(transports: Sequence[str] | None, device: torch.device) -> set[str]:
    """What is asked for; of all, what this process can offer.

    Args:
        transports: as `refit_mx.publisher.MxV2TrainingPublisher`.
        device: of the arenas.

    Raises:
        RefitConfigError: an unknown one, or one that is asked for cannot be used.
    """
    wanted = {"nixl", "shm", "tcp"} if transports is None else set(transports)
    unknown = wanted - {"nixl", "shm", "tcp"}
    if unknown:
        raise RefitConfigError(
            f"transports {', '.join(sorted(unknown))}; expected nixl, shm and tcp"
        )
    missing = {
        name: why
        for name, find in (("nixl", nixl_available), ("shm", lambda: _sharing_missing(device)))
        if name in wanted and (why := find()) is not None
    }
    if transports is not None:
        for name, why in missing.items():
            raise RefitConfigError(f"transport {name!r}: {why}")
        return wanted
    return wanted - missing.keys()


def _sharing_missing(device: torch.device) -> str | None:
    if device.type != "cpu":
        return f"the arenas are on {device}; only memory of the CPU is shared"
    return shared_memory_missing()
