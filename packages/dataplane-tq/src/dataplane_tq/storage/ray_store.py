"""Ray's object store: one Ray object per row and field, and an actor with their references.

The process that put a row owns its objects: when it exits, the rows are lost. TransferQueue would
send tensors over NIXL. This backend stores bytes to avoid that: over NIXL a put of one tensor took
a hundred times longer, and a read of a tensor without elements crashed the reader.
"""

from __future__ import annotations

from dataplane_core import DataPlaneConfig
from dataplane_tq.storage.base import ACTOR_CPUS, StorageBackend, collect_results
from dataplane_tq.upstream import RayObjectRefStorage

# TransferQueue's client finds or creates the actor by this name, in the controller's namespace.
_ACTOR = "RayObjectRefStorage"


class RayStore(StorageBackend):
    """Backend with one actor, which maps keys to object references."""

    manager = "RayStore"
    rows_as_bytes = True

    @classmethod
    def check(cls, cfg: DataPlaneConfig) -> None:
        pass

    def start(self, cfg: DataPlaneConfig, namespace: str) -> None:
        actor = RayObjectRefStorage.options(
            name=_ACTOR, namespace=namespace, num_cpus=ACTOR_CPUS
        ).remote()
        self.actors[_ACTOR] = actor
        collect_results("backend 'ray'", {_ACTOR: actor.__ray_ready__.remote()})
        self.connection = {"client_name": "RayStorageClient"}
