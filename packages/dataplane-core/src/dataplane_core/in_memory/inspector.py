"""`InMemoryInspector`: inspection of the in-memory store, and changes by an operator."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any  # Any: answers differ by method

from dataplane_core.checked_inspector import CheckedInspector
from dataplane_core.ledger import Ledger, PartitionSummary, StorageSummary, actions, inspect
from dataplane_core.ledger.scan import scan, search

_QUERIES: dict[str, Callable[..., Any]] = {
    "count_samples": lambda partition, now, *of: partition.counts(*of),
    "list_samples": lambda partition, now, start, limit: inspect.page(partition, start, limit, now),
    "read_sample": lambda partition, now, sample_id: inspect.sample(partition, sample_id, now),
    "find_samples": lambda partition, now, tag, value, start, limit: search(
        partition, tag, value, start, limit, now
    ),
    "list_claims": lambda partition, now: inspect.claims(partition, now),
    "list_assignments": lambda partition, now: inspect.assignments(partition, now),
    "scan_states": lambda partition, now, *page: scan(partition, *page),
    "reset_consumption": lambda partition, now, task, ids: len(
        actions.reset_consumption(partition, task, ids)
    ),
    "end_claim": lambda partition, now, claim, expired_only: actions.end_claim(
        partition, claim, now, expired_only=expired_only
    ),
}
"""Answers of a partition at the time ``now``, by method."""


class InMemoryInspector(CheckedInspector):
    """Inspector of the in-memory store; each method opens the ledger once or a few times.

    Args:
        open_ledger: `InMemoryDataPlaneClient._ledger`.
        clear_samples: `InMemoryDataPlaneClient.clear_samples`.
    """

    def __init__(
        self,
        open_ledger: Callable[..., AbstractContextManager[Ledger]],
        clear_samples: Callable[..., None],
    ) -> None:
        super().__init__(clear_samples)
        self._ledger = open_ledger

    def _query(self, method: str, *arguments: Any) -> Any:
        partition_id, *others = arguments
        change = method in ("reset_consumption", "end_claim")
        # A lease that is due must not expire before `end_claim` counts its samples.
        with self._ledger(change=change, expire=method != "end_claim") as ledger:
            return _QUERIES[method](ledger.partition(partition_id), time.monotonic(), *others)

    def list_partitions(self) -> list[PartitionSummary]:
        with self._ledger() as ledger:
            now = time.monotonic()
            return [inspect.summarize(each, now) for each in ledger.partitions.values()]

    def list_storage(self) -> list[StorageSummary]:
        with self._ledger():
            return []  # values are Python objects, not in storage units

    def read_totals(self) -> dict[str, int]:
        with self._ledger() as ledger:
            return dict(ledger.totals)
