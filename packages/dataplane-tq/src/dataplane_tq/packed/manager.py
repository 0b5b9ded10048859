"""`PackedStorageManager`: the packed backend's place in TransferQueue's registry of managers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any  # Any: TransferQueue's metas have no static types

from tensordict import TensorDict
from transfer_queue.storage.managers.base import StorageManager, StorageManagerFactory


@StorageManagerFactory.register("PackedStorage")
class PackedStorageManager(StorageManager):
    """Lets TransferQueue's client register rows whose values it does not move.

    The values are written and read by `dataplane_tq.stores.PackedStore`; through TransferQueue's
    own calls they cannot be reached.
    """

    async def put_data(
        self, data: TensorDict, metadata: Any, data_parser: Callable[[Any], Any] | None = None
    ) -> None:
        raise NotImplementedError("backend 'packed' is written through TQDataPlaneClient")

    async def get_data(self, metadata: Any) -> TensorDict:
        raise NotImplementedError("backend 'packed' is read through TQDataPlaneClient")

    async def clear_data(self, metadata: Any) -> None:
        """Nothing to do: the directory frees the bytes of what is cleared."""
