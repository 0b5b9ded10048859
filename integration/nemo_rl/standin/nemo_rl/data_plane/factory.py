"""Factory that chooses a client by ``impl``, with the branch of docs/recipes/nemo-rl.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nemo_rl.data_plane.interfaces import DataPlaneClient


def build_data_plane_client(cfg: Mapping[str, Any], *, bootstrap: bool = True) -> DataPlaneClient:
    if not cfg["enabled"]:
        raise ValueError("data_plane.enabled is false")
    impl = cfg["impl"]
    if impl == "transfer_queue":
        from nemo_rl.data_plane.transfer_queue_client import TQDataPlaneClient

        client = TQDataPlaneClient(cfg, bootstrap=bootstrap)
    elif impl == "rl_dataplane":
        from dataplane_tq.nemo_rl import NeMoRLClient

        client = NeMoRLClient(cfg, bootstrap=bootstrap)
    else:
        raise ValueError(f"unknown data_plane.impl: {impl!r}")
    return client
