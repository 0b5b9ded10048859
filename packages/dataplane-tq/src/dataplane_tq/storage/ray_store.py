"""Ray's object store: one Ray object per row and field, and an actor that knows their references.

The process that put a row owns its objects: when it ends, the rows are lost. TransferQueue sends
tensors, and nothing else, over NIXL, which this backend does without: a put of one tensor took a
hundred times longer, and reading a tensor without elements ended the reading process.
"""

from __future__ import annotations

from dataplane_core import ConfigError, DataPlaneConfig, UnavailableError
from dataplane_tq.storage.base import StorageBackend, answers

# The client finds or creates the actor by these, and neither can be configured.
_ACTOR = "RayObjectRefStorage"
_NAMESPACE = "transfer_queue"


class RayStore(StorageBackend):
    """The actor that maps keys to object references."""

    manager = "RayStore"
    rows_as_bytes = True

    @classmethod
    def check(cls, cfg: DataPlaneConfig) -> None:
        pass

    def start(
        self, cfg: DataPlaneConfig, *, namespace: str, actor_cpus: float, timeout_s: float
    ) -> None:
        if namespace != _NAMESPACE:
            raise ConfigError(
                f"backend 'ray': found namespace {namespace!r}; TransferQueue's client looks for "
                f"its actor in {_NAMESPACE!r} only"
            )
        # Not with the module, which the actors of other backends load, too.
        from transfer_queue.storage.clients.ray_storage_client import RayObjectRefStorage

        actor = RayObjectRefStorage.options(
            name=_ACTOR, namespace=namespace, num_cpus=actor_cpus
        ).remote()
        self.actors[_ACTOR] = actor
        try:
            answers("backend 'ray'", {_ACTOR: actor.__ray_ready__.remote()}, timeout_s=timeout_s)
        except UnavailableError:
            self.stop()
            raise
        self.connection = {"client_name": "RayStorageClient"}
