"""Choice of the transports that a publisher serves."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from refit_mx.errors import RefitConfigError
from refit_mx.memory.mapping import shared_memory_missing
from refit_mx.transports.nixl_library import nixl_obstacle


def served_transports(transports: Sequence[str] | None, device: torch.device) -> set[str]:
    """Return the requested transports, or all that this process can serve if None.

    Raises:
        RefitConfigError: a transport is unknown, or is requested and not available.
    """
    wanted = {"nixl", "shm", "tcp"} if transports is None else set(transports)
    unknown = wanted - {"nixl", "shm", "tcp"}
    if unknown:
        raise RefitConfigError(
            f"transports {', '.join(sorted(unknown))}; expected nixl, shm and tcp"
        )
    missing = {
        name: why
        for name, obstacle in (("nixl", nixl_obstacle), ("shm", lambda: _shm_obstacle(device)))
        if name in wanted and (why := obstacle()) is not None
    }
    if transports is not None:
        for name, why in missing.items():
            raise RefitConfigError(f"transport {name!r}: {why}")
        return wanted
    return wanted - missing.keys()


def _shm_obstacle(device: torch.device) -> str | None:
    if device.type != "cpu":
        return f"the arenas are on {device}; only CPU memory is shared"
    return shared_memory_missing()
