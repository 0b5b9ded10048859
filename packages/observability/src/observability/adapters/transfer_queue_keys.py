"""Keys of TransferQueue's samples, for spans and sample events.

A meta has only the samples' indexes. TransferQueue's controller answers no query while a claim is
blocked in it, for seconds or minutes, but a get needs no controller. So a meta that the program
gets by keys has them in its backend metadata, as it has its origins. Other keys are queried with a
short deadline.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any  # Any: TransferQueue has no types

_HIDDEN = "_dataplane.key"
"""Name of a sample's key in its backend metadata."""
_QUERY_S = 0.1
_PAUSE_S = 100 * _QUERY_S
"""Pause after a query without an answer, so that such queries take at most 1 % of the time."""


def store(meta: Any, keys: Sequence[str]) -> None:
    """Store the keys with which a meta was retrieved, unless the queue lacks some of them."""
    if len(keys) == len(meta._custom_backend_meta):
        for backend, key in zip(meta._custom_backend_meta, keys, strict=True):
            backend[_HIDDEN] = key


class Keys:
    """Keys of samples, from their meta or from the controller."""

    _next_query_s = 0.0

    async def names(self, client: Any, meta: Any, partition_id: str) -> list[str]:
        """Return the keys of a meta's samples in a partition, and store them in the meta.

        A sample is named by its index, such as "#17", if it has no key or the key is unavailable.
        """
        samples = [
            (row, backend)
            for row, backend, partition in zip(
                meta.global_indexes, meta._custom_backend_meta, meta.partition_ids, strict=True
            )
            if partition == partition_id
        ]
        unknown = [sample for sample in samples if _HIDDEN not in sample[1]]
        keys = await self._query(client, [row for row, _ in unknown], partition_id)
        for (_, backend), key in zip(unknown, keys, strict=False):
            if key is not None:
                backend[_HIDDEN] = key
        return [backend.get(_HIDDEN, f"#{row}") for row, backend in samples]

    async def _query(self, client: Any, rows: list[int], partition_id: str) -> list[str | None]:
        """Return the keys of samples, None for one without; an empty list if they are unknown."""
        if not rows or time.monotonic() < self._next_query_s:
            return []
        try:
            async with asyncio.timeout(_QUERY_S):
                keys: list[str | None] = await client.async_kv_retrieve_keys(rows, partition_id)
                return keys
        except TimeoutError:
            self._next_query_s = time.monotonic() + _PAUSE_S
        # The query fails, for example, if samples have no keys. An error raised here would make the
        # program lose its put or claim.
        except Exception:  # noqa: BLE001, S110
            pass
        return []
