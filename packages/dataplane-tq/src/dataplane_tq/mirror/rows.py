"""Coroutines, for the engine's loop, that change rows in TransferQueue's controller.

With every storage backend the controller has every row with its fields and tags. So TransferQueue's
own tools and metrics show what the data plane holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any  # Any: TransferQueue's metas and clients have no static types

import numpy as np

from dataplane_core import UnavailableError
from dataplane_tq.directory.protocol import Orphans
from dataplane_tq.mirror.sampler import CONSUMED
from dataplane_tq.upstream import BatchMeta, KVStorageManager

_NO_SUCH_FIELD = "__dataplane_tq_no_such_field__"
_NOT_A_TENSOR = {"dtype": None, "shape": None, "is_nested": False, "is_non_tensor": True}


async def register(
    client: Any,
    sample_ids: list[str],
    partition_id: str,
    tags: Sequence[dict[str, Any]] | None,
    orphans: Sequence[Orphans],
) -> Any:
    """Give each sample a row; return TransferQueue's meta of the rows.

    Args:
        client: TransferQueue's asynchronous client.
        sample_ids: the samples; a sample that has a row keeps it.
        partition_id: partition of the samples.
        tags: new custom metadata of the rows; None leaves it as it is.
        orphans: rows to drop first.
    """
    await drop(client, partition_id, orphans)
    rows = await client.async_kv_retrieve_meta(sample_ids, partition_id, create=True)
    if tags is not None:
        tagged = rows.select_samples(list(range(rows.size)))
        tagged.clear_custom_meta()
        tagged.update_custom_meta([dict(tag) for tag in tags])
        await client.async_set_custom_meta(tagged)
    return rows


async def enter(
    client: Any,
    sample_ids: list[str],
    partition_id: str,
    tags: Sequence[dict[str, Any]] | None,
    orphans: Sequence[Orphans],
    fields: Sequence[str],
) -> None:
    """Register rows whose values TransferQueue does not hold, and mark their fields as produced."""
    rows = await register(client, sample_ids, partition_id, tags, orphans)
    if fields:
        schema = {name: dict(_NOT_A_TENSOR) for name in fields}
        await client.storage_manager.notify_data_update(partition_id, rows.global_indexes, schema)


async def store(
    client: Any, data: Any, rows: Any, sample_ids: list[str], partition_id: str, what: str
) -> None:
    """Put values through TransferQueue's storage manager, and check that they arrived.

    Raises:
        UnavailableError: the controller lacks a field; TransferQueue itself only logs that.
    """
    await client.storage_manager.put_data(data, rows)
    stored = await client.async_kv_retrieve_meta(sample_ids, partition_id, create=False)
    unseen = set(data.keys()) - set(stored.field_names)
    if unseen:
        raise UnavailableError(
            f"{what}: the controller did not acknowledge fields {sorted(unseen)}"
        )


async def read(
    client: Any, sample_ids: list[str], partition_id: str, fields: Sequence[str], what: str
) -> Any:
    """Read fields of samples that are pinned in the directory."""
    rows = await client.async_kv_retrieve_meta(sample_ids, partition_id, create=False)
    if rows.size != len(sample_ids) or not set(fields) <= set(rows.field_names):
        raise UnavailableError(
            f"{what}: TransferQueue's controller has lost rows or fields that the directory has; "
            "a client outside the data plane cleared them"
        )
    return await client.async_get_data(rows.select_fields(list(fields)))


async def drop(client: Any, partition_id: str, orphans: Sequence[Orphans]) -> None:
    """Remove rows with their values; ignore rows that do not exist."""
    for group in orphans:
        rows = await client.async_kv_retrieve_meta(group.sample_ids, partition_id, create=False)
        if not rows.size:
            continue
        # After an interrupted put or clear the controller may list fewer fields than are stored.
        schema = {name: dict(_NOT_A_TENSOR) for name in group.fields}
        meta = BatchMeta(
            global_indexes=rows.global_indexes,
            partition_ids=rows.partition_ids,
            field_schema={**schema, **rows.field_schema},
            production_status=np.zeros(rows.size, dtype=np.int8),
            _custom_backend_meta=rows._custom_backend_meta,
        )
        if meta.field_names or not isinstance(client.storage_manager, KVStorageManager):
            await client.async_clear_samples(meta)
        else:
            # Key-value backends refuse to clear rows that never had a field.
            await client._clear_meta_in_controller(rows)


async def consume(client: Any, sample_ids: list[str], partition_id: str, task_name: str) -> None:
    """Mark samples as consumed by a task, for TransferQueue's own tools."""
    await client.async_get_meta(
        # With a field that does not exist, the controller skips its scan of the partition.
        data_fields=[_NO_SUCH_FIELD],
        batch_size=0,
        partition_id=partition_id,
        mode="fetch",
        task_name=task_name,
        sampling_config={CONSUMED: sample_ids, "task_name": task_name},
    )


async def forget(client: Any, partition_id: str) -> None:
    """Remove a partition without rows from the controller's list."""
    # TransferQueue's public call ignores a partition without rows.
    await client._clear_partition_in_controller(partition_id)
