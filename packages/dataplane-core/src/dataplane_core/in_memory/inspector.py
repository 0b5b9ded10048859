"""`InMemoryInspector`: inspection of the in-memory store, and changes by an operator."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from dataplane_core.arguments import checked_bool, checked_names
from dataplane_core.boundary import check_inspection
from dataplane_core.capabilities import TaskCounts
from dataplane_core.ledger import Ledger, actions, inspect
from dataplane_core.ledger.scan import check_search, scan, search

if TYPE_CHECKING:
    from dataplane_core.ledger.inspect import (
        AssignmentSummary,
        ClaimSummary,
        PartitionSummary,
        SampleState,
        StatePage,
        StorageSummary,
    )


class InMemoryInspector:
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
        self._ledger = open_ledger
        self.clear_samples = clear_samples

    def count_samples(
        self, partition_id: str, task_name: str, required_fields: list[str]
    ) -> TaskCounts:
        partition_id, task_name = check_inspection(
            "count_samples", partition_id, task_name=task_name
        )
        operation = f"count_samples(partition={partition_id!r})"
        fields = checked_names(operation, "required_fields", required_fields)
        with self._ledger() as ledger:
            return ledger.partition(partition_id).counts(task_name, fields)

    def list_partitions(self) -> list[PartitionSummary]:
        with self._ledger() as ledger:
            now = time.monotonic()
            return [inspect.summarize(each, now) for each in ledger.partitions.values()]

    def list_samples(
        self, partition_id: str, *, start: int = 0, limit: int = 100
    ) -> list[SampleState]:
        (partition_id,) = check_inspection("list_samples", partition_id)

        def read_page(start: int, limit: int) -> list[SampleState]:
            with self._ledger() as ledger:
                return inspect.page(ledger.partition(partition_id), start, limit, time.monotonic())

        return inspect.read_in_steps(start, limit, read_page)

    def read_sample(self, partition_id: str, sample_id: str) -> SampleState | None:
        partition_id, sample_id = check_inspection("read_sample", partition_id, sample_id=sample_id)
        with self._ledger() as ledger:
            return inspect.sample(ledger.partition(partition_id), sample_id, time.monotonic())

    def find_samples(
        self, partition_id: str, *, tag: str, value: object, limit: int = 100
    ) -> list[SampleState]:
        partition_id, tag = check_inspection("find_samples", partition_id, tag=tag)
        value, limit = check_search(tag, value, limit)
        matches: list[SampleState] = []
        start: int | None = 0
        while start is not None:
            with self._ledger() as ledger:
                more, start = search(
                    ledger.partition(partition_id),
                    tag,
                    value,
                    start,
                    limit - len(matches),
                    time.monotonic(),
                )
            matches += more
        return matches

    def list_claims(self, partition_id: str) -> list[ClaimSummary]:
        (partition_id,) = check_inspection("list_claims", partition_id)
        with self._ledger() as ledger:
            return inspect.claims(ledger.partition(partition_id), time.monotonic())

    def list_assignments(self, partition_id: str) -> list[AssignmentSummary]:
        (partition_id,) = check_inspection("list_assignments", partition_id)
        with self._ledger() as ledger:
            return inspect.assignments(ledger.partition(partition_id), time.monotonic())

    def scan_states(self, partition_id: str, *, start: int = 0, limit: int = 10_000) -> StatePage:
        (partition_id,) = check_inspection("scan_states", partition_id)
        with self._ledger() as ledger:
            return scan(ledger.partition(partition_id), start, limit)

    def list_storage(self) -> list[StorageSummary]:
        with self._ledger():
            return []  # values are Python objects, not in storage units

    def read_totals(self) -> dict[str, int]:
        with self._ledger() as ledger:
            return dict(ledger.totals)

    def reset_consumption(self, partition_id: str, task_name: str, sample_ids: list[str]) -> int:
        method = "reset_consumption"
        partition_id, task_name = check_inspection(method, partition_id, task_name=task_name)
        ids = checked_names(method, "sample_ids", sample_ids)
        with self._ledger(change=True) as ledger:
            return len(actions.reset_consumption(ledger.partition(partition_id), task_name, ids))

    def end_claim(self, partition_id: str, claim: str, *, expired_only: bool = True) -> int:
        partition_id, claim = check_inspection("end_claim", partition_id, claim=claim)
        expired_only = checked_bool("end_claim", "expired_only", expired_only)
        with self._ledger(change=True, expire=False) as ledger:
            partition = ledger.partition(partition_id)
            return actions.end_claim(partition, claim, time.monotonic(), expired_only=expired_only)
