"""`MinimalClient`: a client with the documented methods only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any  # Any: tags hold the caller's own primitives

from dataplane_core.in_memory import InMemoryDataPlaneClient

if TYPE_CHECKING:
    from tensordict import TensorDict

    from dataplane_core.meta import KVBatchMeta


class MinimalClient:
    """Client with the eight documented methods and their documented arguments; no base class.

    For tests of layers that work with any client. Any other method raises AttributeError, any other
    keyword TypeError.

    Args:
        store: the in-memory client that does the work; None creates one.
    """

    def __init__(self, store: InMemoryDataPlaneClient | None = None) -> None:
        self._store = InMemoryDataPlaneClient() if store is None else store

    def register_partition(
        self,
        partition_id: str,
        fields: list[str],
        num_samples: int,
        consumer_tasks: list[str],
        grpo_group_size: int | None = None,
        enums: dict[str, list[str]] | None = None,
    ) -> None:
        """See `DataPlaneClient.register_partition`."""
        self._store.register_partition(
            partition_id, fields, num_samples, consumer_tasks, grpo_group_size, enums
        )

    def claim_meta(
        self,
        partition_id: str,
        task_name: str,
        required_fields: list[str],
        batch_size: int,
        dp_rank: int | None = None,
        blocking: bool = True,
        timeout_s: float = 60.0,
    ) -> KVBatchMeta:
        """See `DataPlaneClient.claim_meta`."""
        return self._store.claim_meta(
            partition_id, task_name, required_fields, batch_size, dp_rank, blocking, timeout_s
        )

    def get_data(self, meta: KVBatchMeta, select_fields: list[str] | None = None) -> TensorDict:
        """See `DataPlaneClient.get_data`."""
        return self._store.get_data(meta, select_fields)

    def check_consumption_status(self, partition_id: str, task_names: list[str]) -> bool:
        """See `DataPlaneClient.check_consumption_status`."""
        return self._store.check_consumption_status(partition_id, task_names)

    def put_samples(
        self,
        sample_ids: list[str],
        partition_id: str,
        fields: TensorDict | None = None,
        tags: list[dict[str, Any]] | None = None,
    ) -> KVBatchMeta:
        """See `DataPlaneClient.put_samples`."""
        return self._store.put_samples(sample_ids, partition_id, fields, tags)

    def get_samples(
        self, sample_ids: list[str], partition_id: str, select_fields: list[str]
    ) -> TensorDict:
        """See `DataPlaneClient.get_samples`."""
        return self._store.get_samples(sample_ids, partition_id, select_fields)

    def clear_samples(self, sample_ids: list[str] | None, partition_id: str) -> None:
        """See `DataPlaneClient.clear_samples`."""
        self._store.clear_samples(sample_ids, partition_id)

    def close(self) -> None:
        """See `DataPlaneClient.close`."""
        self._store.close()
