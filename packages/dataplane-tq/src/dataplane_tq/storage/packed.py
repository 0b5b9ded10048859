"""The packed backend's storage units: Ray actors with shared memory that clients access."""

from __future__ import annotations

import secrets

import ray

from dataplane_core import DataPlaneConfig
from dataplane_core.config import require_keys
from dataplane_tq.directory.wire import TOKEN_BYTES
from dataplane_tq.packed.unit import UnitActor
from dataplane_tq.packed.unit_wire import UnitAddress, UnitSpec
from dataplane_tq.storage.base import (
    ACTOR_CPUS,
    StorageBackend,
    collect_results,
    require_bytes,
    require_resources,
)
from dataplane_tq.storage.packed_manager import BACKEND

_MIN_BYTES = 1 << 20


class Packed(StorageBackend):
    """Backend of ``num_storage_units`` units with ``global_segment_size`` bytes each."""

    manager = BACKEND
    options = ("unit_resources", "packed_transport")

    def __init__(self) -> None:
        super().__init__()
        self.units: list[UnitSpec] = []

    @property
    def watched(self) -> tuple[list[UnitAddress], bytes]:
        """Addresses of the started units and their token, for the directory to watch them."""
        return list(self.connection["units"].values()), self.connection["token"]

    @classmethod
    def check(cls, cfg: DataPlaneConfig) -> None:
        require_keys(cfg, ["num_storage_units"], impl=cfg["impl"])
        require_resources(cfg)
        require_bytes(cfg, "global_segment_size", backend="packed", min_bytes=_MIN_BYTES)

    def start(self, cfg: DataPlaneConfig, namespace: str) -> None:
        token = secrets.token_bytes(TOKEN_BYTES)
        nbytes = cfg["global_segment_size"]
        for rank in range(cfg["num_storage_units"]):
            name = f"DataPlanePackedUnit#{rank}"
            self.actors[name] = (
                ray.remote(UnitActor)
                .options(
                    name=name,
                    namespace=namespace,
                    num_cpus=ACTOR_CPUS,
                    resources=cfg.get("unit_resources", {}),
                    scheduling_strategy="SPREAD",
                )
                .remote(name, nbytes, token)
            )
        calls = {name: unit.describe.remote() for name, unit in self.actors.items()}
        units = collect_results("backend 'packed'", calls)
        self.units = [UnitSpec(name, node, nbytes) for name, (_, node) in units.items()]
        self.connection = {
            "units": {name: address for name, (address, _) in units.items()},
            "token": token,
            "transport": cfg.get("packed_transport", "auto"),
        }
