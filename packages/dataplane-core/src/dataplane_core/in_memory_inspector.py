"""`InMemoryInspector`: what the client in memory tells of its books; changes by hand."""

from __future__ import annotations

import time
from abc import abstractmethod
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from dataplane_core.arguments import checked_bool, checked_names
from dataplane_core.boundary import check_look, check_read
from dataplane_core.client import DataPlaneClient, TaskCounts
from dataplane_core.ledger import Ledger, actions, inspect
from dataplane_core.ledger.scan import check_search, scan, search

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dataplane_core.ledger.inspect import (
        ClaimSummary,
        PartitionSummary,
        SampleState,
        ShareSummary,
        StatePage,
        StorageSummary,
    )


class InMemoryInspector(DataPlaneClient):
    """The inspector's methods over `_books`."""

    @abstractmethod
    def _books(
        self, *, change: bool = False, expire: bool = True
    ) -> AbstractContextManager[Ledger]:
        """The ledger, for this thread alone.

        Args:
            change: it is going to be changed; who waits for that is woken at the end.
            expire: leases whose time is over are ended first.
        """

    def count_samples(
        self, partition_id: str, task_name: str, required_fields: list[str]
    ) -> TaskCounts:
        partition_id, task_name = check_look("count_samples", partition_id, task_name=task_name)
        fields = checked_names("count_samples", "required_fields", required_fields)
        with self._books() as ledger:
            return ledger.partition(partition_id).counts(task_name, fields)

    def read_origins(
        self, sample_ids: Sequence[str], partition_id: str, fields: Sequence[str]
    ) -> dict[str, int]:
        read = check_read("read_origins", sample_ids, partition_id, fields)
        with self._books() as ledger:
            return ledger.partition(read.partition_id).origins(read.sample_ids, read.fields)

    def list_partitions(self) -> list[PartitionSummary]:
        with self._books() as ledger:
            now = time.monotonic()
            return [inspect.summarise(book, now) for book in ledger.partitions.values()]

    def list_samples(
        self, partition_id: str, *, start: int = 0, limit: int = 100
    ) -> list[SampleState]:
        (partition_id,) = check_look("list_samples", partition_id)

        def ask(start: int, limit: int) -> list[SampleState]:
            with self._books() as ledger:
                return inspect.page(ledger.partition(partition_id), start, limit, time.monotonic())

        return inspect.in_steps(start, limit, ask)

    def read_sample(self, partition_id: str, sample_id: str) -> SampleState | None:
        partition_id, sample_id = check_look("read_sample", partition_id, sample_id=sample_id)
        with self._books() as ledger:
            return inspect.sample(ledger.partition(partition_id), sample_id, time.monotonic())

    def find_samples(
        self, partition_id: str, *, tag: str, value: object, limit: int = 100
    ) -> list[SampleState]:
        partition_id, tag = check_look("find_samples", partition_id, tag=tag)
        value, limit = check_search(tag, value, limit)
        found: list[SampleState] = []
        start: int | None = 0
        while start is not None:
            with self._books() as ledger:
                more, start = search(
                    ledger.partition(partition_id),
                    tag,
                    value,
                    start,
                    limit - len(found),
                    time.monotonic(),
                )
            found += more
        return found

    def list_claims(self, partition_id: str) -> list[ClaimSummary]:
        (partition_id,) = check_look("list_claims", partition_id)
        with self._books() as ledger:
            return inspect.claims(ledger.partition(partition_id), time.monotonic())

    def list_shares(self, partition_id: str) -> list[ShareSummary]:
        (partition_id,) = check_look("list_shares", partition_id)
        with self._books() as ledger:
            return inspect.shares(ledger.partition(partition_id), time.monotonic())

    def scan_states(self, partition_id: str, *, start: int = 0, limit: int = 10_000) -> StatePage:
        (partition_id,) = check_look("scan_states", partition_id)
        with self._books() as ledger:
            return scan(ledger.partition(partition_id), start, limit)

    def list_storage(self) -> list[StorageSummary]:
        with self._books():
            return []  # the values are Python's own

    def read_totals(self) -> dict[str, int]:
        with self._books() as ledger:
            return dict(ledger.totals)

    def reset_consumption(self, partition_id: str, task_name: str, sample_ids: list[str]) -> int:
        method = "reset_consumption"
        partition_id, task_name = check_look(method, partition_id, task_name=task_name)
        ids = checked_names(method, "sample_ids", sample_ids)
        with self._books(change=True) as ledger:
            return len(actions.reset_consumption(ledger.partition(partition_id), task_name, ids))

    def end_claim(self, partition_id: str, claim: str, *, expired_only: bool = True) -> int:
        partition_id, claim = check_look("end_claim", partition_id, claim=claim)
        expired_only = checked_bool("end_claim", "expired_only", expired_only)
        with self._books(change=True, expire=False) as ledger:
            partition = ledger.partition(partition_id)
            return actions.end_claim(partition, claim, time.monotonic(), expired_only=expired_only)
