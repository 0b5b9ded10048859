"""`DataPlaneClient` and `KVBatchMeta`, as the public reference of NeMo-RL lists them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from tensordict import TensorDict


@dataclass
class KVBatchMeta:
    partition_id: str
    task_name: str | None
    sample_ids: list[str]
    fields: list[str] | None = None
    sequence_lengths: list[int] | None = None
    extra_info: dict[str, Any] = field(default_factory=dict)
    tags: list[dict[str, Any]] | None = None

    @property
    def size(self) -> int:
        return len(self.sample_ids)

    def concat(self, *others: KVBatchMeta) -> KVBatchMeta:
        metas = [self, *others]
        if any(type(meta) is not KVBatchMeta for meta in metas):
            raise TypeError(f"found {[type(meta) for meta in metas]}; expected NeMo-RL's metas")
        ids = [sample_id for meta in metas for sample_id in meta.sample_ids]
        return KVBatchMeta(self.partition_id, self.task_name, ids, self.fields)


class DataPlaneClient(ABC):
    @abstractmethod
    def register_partition(
        self,
        partition_id: str,
        fields: list[str],
        num_samples: int,
        consumer_tasks: list[str],
        grpo_group_size: int | None = None,
        enums: dict[str, list[str]] | None = None,
    ) -> None: ...

    @abstractmethod
    def claim_meta(
        self,
        partition_id: str,
        task_name: str,
        required_fields: list[str],
        batch_size: int,
        dp_rank: int | None = None,
        blocking: bool = True,
        timeout_s: float = 60.0,
    ) -> KVBatchMeta: ...

    @abstractmethod
    def get_data(self, meta: KVBatchMeta, select_fields: list[str] | None = None) -> TensorDict: ...

    @abstractmethod
    def check_consumption_status(self, partition_id: str, task_names: list[str]) -> bool: ...

    @abstractmethod
    def put_samples(
        self,
        sample_ids: list[str],
        partition_id: str,
        fields: TensorDict | None = None,
        tags: list[dict[str, Any]] | None = None,
    ) -> KVBatchMeta: ...

    @abstractmethod
    def get_samples(
        self, sample_ids: list[str], partition_id: str, select_fields: list[str]
    ) -> TensorDict: ...

    @abstractmethod
    def clear_samples(self, sample_ids: list[str] | None, partition_id: str) -> None: ...

    @abstractmethod
    def close(self) -> None: ...
