"""TransferQueue without an adapter: packed columns in, nested columns out."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, ClassVar

import transfer_queue
from integration.benchmarks.cases import Batch
from integration.benchmarks.systems import STORE_OPERATIONS, Operation, System, plain_queue
from tensordict import TensorDict


class Raw(System):
    """System of `transfer_queue.kv_batch_put` and `kv_batch_get`; a claim is one ``get_meta``.

    The first put creates a partition, and the connection closes with the process.
    """

    operations: ClassVar[frozenset[Operation]] = STORE_OPERATIONS

    def __init__(self, config: Any) -> None:
        self._client = plain_queue.connect(config)

    def put(self, batch: Batch, partition: str) -> None:
        """Put columns that were packed before."""
        self._put(batch.ids, partition, batch.jagged)

    def get(
        self, batch: Batch, partition: str, names: Sequence[str], rows: slice, handle: Any
    ) -> Any:
        """Get, and leave the columns nested."""
        return transfer_queue.kv_batch_get(batch.ids[rows], partition, list(names))

    def write_back(self, batch: Batch, partition: str) -> None:
        """Put one column that was packed before."""
        self._put(batch.ids, partition, batch.jagged_written_back)

    def claim(self, partition: str, task: str, fields: Sequence[str], count: int) -> int:
        """Claim indexes, without the keys of their rows."""
        return int(self._claim(partition, task, fields, count).size)

    def clear(self, batch: Batch, partition: str) -> None:
        """Drop the rows by key."""
        transfer_queue.kv_clear(batch.ids, partition)

    def end(self, partition: str) -> None:
        """Drop the partition."""
        self._client.clear_partition(partition)

    def fill(self, partition: str, rows: int, field: str, tasks: Sequence[str]) -> None:
        """Register rows in the controller only; a claim does not access the storage units."""
        meta = self._client.get_meta([field], rows, partition, mode="insert")
        schema = {
            "dtype": "torch.float32",
            "shape": (),
            "is_nested": False,
            "is_non_tensor": True,
        }
        asyncio.run(
            self._client.storage_manager.notify_data_update(
                partition, meta.global_indexes, {field: schema}
            )
        )

    def _put(self, ids: list[str], partition: str, fields: TensorDict) -> None:
        transfer_queue.kv_batch_put(ids, partition, fields)

    def _claim(self, partition: str, task: str, fields: Sequence[str], count: int) -> Any:
        return self._client.get_meta(list(fields), count, partition, task_name=task)
