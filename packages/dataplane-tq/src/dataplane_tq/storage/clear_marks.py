"""Removal of the marks that a refused clear has left.

Before it calls the storage manager, TransferQueue marks the rows of a clear as not produced, so
that no task claims them. If the clear fails, the marks remain. A stale meta marks the rows of other
samples, so the packed backend removes the marks itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any  # Any: TransferQueue's messages have no static types

from dataplane_tq.storage.new_keys import exchange
from dataplane_tq.upstream import StorageManager

_SAME_SCHEMA = {"is_non_tensor": True}
"""Schema of a report that leaves the schema of a known field as it is."""
_PAUSE_S = 0.1
"""Pause before the removal is tried again."""


async def remove_clear_marks(
    manager: StorageManager, partition_id: str, indexes: Sequence[int], timeout_s: float
) -> None:
    """Let tasks claim rows again, with the fields whose puts were reported.

    Call it in the manager's own event loop. It tries again until the deadline if the controller
    answers with an error or a refusal.

    The rows must be pinned: then no clear of them reaches the controller before the removal.

    Args:
        manager: storage manager whose connection to the controller is used.
        partition_id: partition of the rows.
        indexes: global indexes of rows that have values.
        timeout_s: deadline of the tries, and of each request, in seconds.

    Raises:
        RuntimeError, TimeoutError: the controller failed or refused, or did not answer in time.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return await _remove(manager, partition_id, indexes, timeout_s)
        except RuntimeError:
            if time.monotonic() + _PAUSE_S > deadline:
                raise
        await asyncio.sleep(_PAUSE_S)


async def _remove(
    manager: StorageManager, partition_id: str, indexes: Sequence[int], timeout_s: float
) -> None:
    known = await reported_cells(manager, partition_id, timeout_s)
    rows_of: dict[tuple[str, ...], list[int]] = {}
    for index in indexes:
        if fields := tuple(known.get(index, ())):
            rows_of.setdefault(fields, []).append(index)
    for fields, rows in rows_of.items():
        body = {
            "partition_id": partition_id,
            "global_indexes": rows,
            "field_schema": dict.fromkeys(fields, _SAME_SCHEMA),
        }
        answer = await exchange(
            manager, "NOTIFY_DATA_UPDATE", "NOTIFY_DATA_UPDATE_ACK", body, timeout_s
        )
        if not answer["success"]:
            raise RuntimeError("NOTIFY_DATA_UPDATE: refused; see the controller's log")


async def reported_cells(
    manager: StorageManager, partition_id: str, timeout_s: float
) -> dict[int, dict[str, int]]:
    """Return the cells that puts have reported, by row and field; empty without the partition.

    Call it in the manager's own event loop.

    Raises:
        RuntimeError, TimeoutError: as `exchange`.
    """
    body = {"partition_id": partition_id}
    answer = await exchange(
        manager, "GET_PARTITION_META", "GET_PARTITION_META_RESPONSE", body, timeout_s
    )
    meta = answer["metadata"]
    if meta is None:
        return {}
    rows = zip(meta.global_indexes, meta._custom_backend_meta, strict=True)
    return {index: cells_of_row(row) for index, row in rows}


def cells_of_row(row: dict[str, Any]) -> dict[str, int]:
    """Return the cells in a row of a meta, without the text that the instrumentor adds."""
    return {name: cell for name, cell in row.items() if isinstance(cell, int)}
