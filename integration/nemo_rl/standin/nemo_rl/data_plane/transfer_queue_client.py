"""Client with NeMo-RL's methods alone, on TransferQueue through its own API.

It does what the reference says, and adds nothing: TransferQueue decides in what form values return.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import transfer_queue as tq
from omegaconf import OmegaConf
from tensordict import TensorDict

from nemo_rl.data_plane.interfaces import DataPlaneClient, KVBatchMeta


class TQDataPlaneClient(DataPlaneClient):
    def __init__(self, cfg: Mapping[str, Any], *, bootstrap: bool = True) -> None:
        units = {
            "num_data_storage_units": cfg["num_storage_units"],
            "total_storage_size": cfg["storage_capacity"],
        }
        backend = {"storage_backend": "SimpleStorage", "SimpleStorage": units}
        config = {"controller": {"polling_mode": True}, "backend": backend}
        tq.init(OmegaConf.create(config) if bootstrap else None)
        self._queue = tq.get_client()
        self._poll_s = cfg["claim_meta_poll_interval_s"]
        self._owns_queue = bootstrap

    def register_partition(
        self,
        partition_id: str,
        fields: list[str],
        num_samples: int,
        consumer_tasks: list[str],
        grpo_group_size: int | None = None,
        enums: dict[str, list[str]] | None = None,
    ) -> None:
        """Do nothing: TransferQueue needs no declaration."""

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
        deadline = time.monotonic() + timeout_s
        while True:
            rows = self._queue.get_meta(
                required_fields, batch_size, partition_id, mode="fetch", task_name=task_name
            )
            if rows.size or not blocking:
                break
            if time.monotonic() > deadline:
                raise TimeoutError(f"claim_meta: no {batch_size} samples in {timeout_s} s")
            time.sleep(self._poll_s)
        ids = self._queue.kv_retrieve_keys(list(rows.global_indexes), partition_id)
        return KVBatchMeta(partition_id, task_name, ids, required_fields, tags=rows.custom_meta)

    def get_data(self, meta: KVBatchMeta, select_fields: list[str] | None = None) -> TensorDict:
        fields = select_fields or meta.fields
        if fields is None:
            raise ValueError("get_data: select_fields or meta.fields must be given")
        return self.get_samples(meta.sample_ids, meta.partition_id, fields)

    def check_consumption_status(self, partition_id: str, task_names: list[str]) -> bool:
        return all(self._queue.check_consumption_status(task, partition_id) for task in task_names)

    def put_samples(
        self,
        sample_ids: list[str],
        partition_id: str,
        fields: TensorDict | None = None,
        tags: list[dict[str, Any]] | None = None,
    ) -> KVBatchMeta:
        tq.kv_batch_put(keys=sample_ids, partition_id=partition_id, fields=fields, tags=tags)
        names = None if fields is None else list(fields.keys())
        return KVBatchMeta(partition_id, None, sample_ids, names, tags=tags)

    def get_samples(
        self, sample_ids: list[str], partition_id: str, select_fields: list[str]
    ) -> TensorDict:
        return tq.kv_batch_get(sample_ids, partition_id, select_fields)

    def clear_samples(self, sample_ids: list[str] | None, partition_id: str) -> None:
        if sample_ids is None:
            self._queue.clear_partition(partition_id)
        else:
            tq.kv_clear(sample_ids, partition_id)

    def close(self) -> None:
        if self._owns_queue:
            tq.close()
