"""Impl ``nemo_rl``: NeMo-RL's own client, with which `SyncRolloutActor` attaches to a store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any  # Any: configuration of another package

from dataplane_core import DataPlaneClient
from dataplane_core.documented_client import as_client


def build_client(cfg: Mapping[str, Any], *, bootstrap: bool = True) -> DataPlaneClient:
    """Build NeMo-RL's client for TransferQueue.

    Args:
        cfg: NeMo-RL's section ``data_plane``, with the impl ``nemo_rl``.
        bootstrap: True in the one process that starts the store, False to attach to it.
    """
    from nemo_rl.data_plane.factory import build_data_plane_client

    # dataplane_core's factory applies `observability`; NeMo-RL's would wrap the client again.
    own = {name: value for name, value in cfg.items() if name != "observability"}
    client = build_data_plane_client({**own, "impl": "transfer_queue"}, bootstrap=bootstrap)
    return as_client(client)
