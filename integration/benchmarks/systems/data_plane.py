"""The data plane's client with column-io: padded columns in, padded columns out."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from integration.benchmarks.cases import FIELDS, WRITTEN_BACK, Batch
from integration.benchmarks.systems import STORE_OPERATIONS, TASKS, Operation, System
from tensordict import TensorDict

from column_io import read_columns, write_columns
from dataplane_core import KVBatchMeta
from dataplane_tq import TQDataPlaneClient

_FILL_CHUNK = 10_000


def config(backend: str, **extra: Any) -> dict[str, Any]:
    """Return the configuration of a backend with one storage unit, as the baseline has.

    ``extra`` keys, such as ``packed_transport``, are added unchanged.
    """
    return {
        "enabled": True,
        "impl": "transfer_queue",
        "backend": backend,
        "storage_capacity": 400_000,
        "num_storage_units": 1,
        "claim_meta_poll_interval_s": 0.5,
        "global_segment_size": 2 << 30,
        "local_buffer_size": 0,
        "ack_timeout_ms": 120_000,
        **extra,
    }


class DataPlane(System):
    """System attached to the data plane that the benchmark's driver started."""

    operations: ClassVar[frozenset[Operation]] = STORE_OPERATIONS

    def __init__(self, cfg: Mapping[str, Any]) -> None:
        self._client = TQDataPlaneClient(cfg, bootstrap=False)

    def begin(self, partition: str, rows: int) -> None:
        """Register the partition."""
        self._client.register_partition(partition, list(FIELDS), rows, list(TASKS))

    def put(self, batch: Batch, partition: str) -> None:
        """Write padded columns."""
        write_columns(self._client, _meta(batch, partition), batch.padded)

    def get(
        self, batch: Batch, partition: str, names: Sequence[str], rows: slice, handle: Any
    ) -> Any:
        """Read padded columns."""
        return read_columns(self._client, _meta(batch, partition, rows), names)

    def write_back(self, batch: Batch, partition: str) -> None:
        """Write one additional column."""
        column = {WRITTEN_BACK: batch.column(WRITTEN_BACK)}
        write_columns(self._client, _meta(batch, partition), column)

    def claim(self, partition: str, task: str, fields: Sequence[str], count: int) -> int:
        """Claim ready samples, with their ids."""
        return self._client.claim_meta(partition, task, list(fields), count, blocking=False).size

    def clear(self, batch: Batch, partition: str) -> None:
        """Drop the rows by id."""
        self._client.clear_samples(batch.ids, partition, force=True)

    def end(self, partition: str) -> None:
        """Clear the partition."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # nothing to clear
            self._client.clear_samples(None, partition, force=True)

    def fill(self, partition: str, rows: int, field: str, tasks: Sequence[str]) -> None:
        """Put a dense column in chunks."""
        self._client.register_partition(partition, [field], rows, list(tasks))
        for start in range(0, rows, _FILL_CHUNK):
            ids = [f"row-{row}" for row in range(start, min(start + _FILL_CHUNK, rows))]
            column = TensorDict({field: torch.ones(len(ids))}, batch_size=[len(ids)])
            self._client.put_samples(ids, partition, column)

    def put_small(self, partition: str, ids: Sequence[str], field: str) -> None:
        """Put a small dense column."""
        self._client.put_columns(list(ids), partition, {field: torch.ones(len(ids))})

    def summarize(self, partition: str) -> int:
        """Summarize all partitions; return the number of rows of this one."""
        [summary] = [
            summary
            for summary in self._client.inspector.list_partitions()
            if summary.partition_id == partition
        ]
        return summary.present

    def page(self, partition: str, start: int, limit: int) -> None:
        """List samples with their fields, tags and state."""
        self._client.inspector.list_samples(partition, start=start, limit=limit)

    def count(self, partition: str, task: str, field: str) -> None:
        """Count the samples of a task by state."""
        self._client.inspector.count_samples(partition, task, [field])

    def close(self) -> None:
        """Detach."""
        self._client.close()


def _meta(batch: Batch, partition: str, rows: slice = slice(None)) -> KVBatchMeta:
    return KVBatchMeta(
        partition_id=partition,
        task_name=None,
        sample_ids=batch.ids[rows],
        sequence_lengths=batch.cuts[rows],
    )
