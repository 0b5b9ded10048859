"""TransferQueue's own storage units: Ray actors that hold rows in memory and speak ZMQ."""

from __future__ import annotations

import uuid
from importlib import resources
from typing import Any  # Any: OmegaConf has no static types

from omegaconf import OmegaConf

from dataplane_core import DataPlaneConfig
from dataplane_core.config import require_keys
from dataplane_tq.storage.base import (
    ACTOR_CPUS,
    StorageBackend,
    collect_results,
    require_resources,
)
from dataplane_tq.upstream import SimpleStorageUnit


class Simple(StorageBackend):
    """Backend of ``num_storage_units`` storage units, spread over the nodes."""

    manager = "SimpleStorage"
    options = ("unit_resources",)

    @classmethod
    def check(cls, cfg: DataPlaneConfig) -> None:
        require_keys(cfg, ["num_storage_units"], impl=cfg["impl"])
        require_resources(cfg)

    def start(self, cfg: DataPlaneConfig, namespace: str) -> None:
        options: dict[str, Any] = {
            **defaults("SimpleStorage"),
            "num_data_storage_units": cfg["num_storage_units"],
            "_run_id": uuid.uuid4().hex,
        }
        for rank in range(cfg["num_storage_units"]):
            name = f"TransferQueueStorageUnit#{rank}"
            self.actors[name] = SimpleStorageUnit.options(
                name=name,
                namespace=namespace,
                num_cpus=ACTOR_CPUS,
                resources=cfg.get("unit_resources", {}),
                scheduling_strategy="SPREAD",
            ).remote(config=options)
        calls = {name: unit.get_zmq_server_info.remote() for name, unit in self.actors.items()}
        addresses = collect_results("backend 'simple'", calls)
        self.connection = {**options, "zmq_info": addresses}


def defaults(manager: str) -> dict[str, Any]:
    """Return TransferQueue's default options of one storage manager."""
    config = OmegaConf.load(str(resources.files("transfer_queue") / "config.yaml"))
    options: dict[str, Any] = OmegaConf.to_container(config.backend[manager])
    return options
