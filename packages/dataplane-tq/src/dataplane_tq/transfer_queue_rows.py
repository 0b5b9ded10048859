"""Rows in TransferQueue's controller: registered, published, tagged, consumed, dropped.

Coroutines for the engine's loop. Whatever the storage backend, the controller knows every row, its
fields and its tags, so that TransferQueue's own tools and metrics see what the data plane holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any  # Any: TransferQueue's metas and clients have no static types

import numpy as np

from dataplane_core import UnavailableError
from dataplane_tq.protocol import Leftover
from dataplane_tq.sampler import CONSUMED
from dataplane_tq.upstream import BatchMeta, KVStorageManager

_NO_SUCH_FIELD = "__dataplane_tq_no_such_field__"
_NOT_A_TENSOR = {"dtype": None, "shape": None, "is_nested": False, "is_non_tensor": True}


async def register(
    client: Any,
    sample_ids: list[str],
    partition_id: str,
    tags: Sequence[dict[str, Any]] | None,
    leftovers: Sequence[Leftover],
) -> Any:
    """Give each sample a row; returns TransferQueue's meta of them.

    Args:
        client: TransferQueue's asynchronous client.
        sample_ids: the samples; those that have a row keep it.
        partition_id: their partition.
        tags: become the rows' custom metadata; None leaves it.
        leftovers: rows that must go first.
    """
    await drop(client, partition_id, leftovers)
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
    leftovers: Sequence[Leftover],
    fields: Sequence[str],
) -> None:
    """`register` rows whose values TransferQueue does not hold, and `publish` their fields."""
    rows = await register(client, sample_ids, partition_id, tags, leftovers)
    if fields:
        await publish(client, rows, partition_id, fields)


async def publish(client: Any, rows: Any, partition_id: str, fields: Sequence[str]) -> None:
    """Mark fields of rows as produced, for values that TransferQueue does not hold itself."""
    schema = {name: dict(_NOT_A_TENSOR) for name in fields}
    await client.storage_manager.notify_data_update(partition_id, rows.global_indexes, schema)


async def store(
    client: Any, data: Any, rows: Any, sample_ids: list[str], partition_id: str, what: str
) -> None:
    """Put values through TransferQueue's storage manager, and see that they arrived.

    Raises:
        UnavailableError: the controller did not learn of a field; TransferQueue only logs that.
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
    """Fetch fields of samples that are pinned in the directory."""
    rows = await client.async_kv_retrieve_meta(sample_ids, partition_id, create=False)
    if rows.size != len(sample_ids) or not set(fields) <= set(rows.field_names):
        raise UnavailableError(
            f"{what}: TransferQueue's controller lost rows or fields that the directory knows; "
            "something outside the data plane cleared them"
        )
    return await client.async_get_data(rows.select_fields(list(fields)))


async def drop(client: Any, partition_id: str, leftovers: Sequence[Leftover]) -> None:
    """Remove rows with their values; those that are not there are passed over."""
    for leftover in leftovers:
        rows = await client.async_kv_retrieve_meta(leftover.sample_ids, partition_id, create=False)
        if not rows.size:
            continue
        # The controller may know less than was stored: of a put or a clear that ended half-way.
        schema = {name: dict(_NOT_A_TENSOR) for name in leftover.fields}
        whole = BatchMeta(
            global_indexes=rows.global_indexes,
            partition_ids=rows.partition_ids,
            field_schema={**schema, **rows.field_schema},
            production_status=np.zeros(rows.size, dtype=np.int8),
            _custom_backend_meta=rows._custom_backend_meta,
        )
        if whole.field_names or not isinstance(client.storage_manager, KVStorageManager):
            await client.async_clear_samples(whole)
        else:
            # Key-value backends refuse to clear rows that never had a field.
            await client._clear_meta_in_controller(rows)


async def consume(client: Any, sample_ids: list[str], partition_id: str, task_name: str) -> None:
    """Enter samples as consumed by a task, for TransferQueue's own tools."""
    await client.async_get_meta(
        # A field that is not there spares the controller a scan of the whole partition.
        data_fields=[_NO_SUCH_FIELD],
        batch_size=0,
        partition_id=partition_id,
        mode="fetch",
        task_name=task_name,
        sampling_config={CONSUMED: sample_ids, "task_name": task_name},
    )


async def forget(client: Any, partition_id: str) -> None:
    """Remove a partition, whose rows are gone, from the controller's list."""
    # TransferQueue's own call takes a partition without rows for one that does not exist.
    await client._clear_partition_in_controller(partition_id)
