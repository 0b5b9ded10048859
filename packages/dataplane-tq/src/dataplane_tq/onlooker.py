"""`Onlooker`: how a client looks into the directory, and what it changes there by hand."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TypeVar

from dataplane_core import (
    ClaimSummary,
    DataPlaneClient,
    PartitionSummary,
    SampleState,
    ShareSummary,
    StatePage,
    StorageSummary,
    TaskCounts,
)
from dataplane_core.ledger.inspect import in_steps
from dataplane_core.ledger.scan import checked_value
from dataplane_tq import protocol as p

T = TypeVar("T")


class Onlooker(DataPlaneClient):
    """The inspector's methods and the actions, each one request to the directory."""

    @abstractmethod
    def _look(self, what: str, request: p.Request, answer: type[T]) -> T:
        """One request that belongs to no operation; ``what`` names it in errors."""

    def check_consumption_status(self, partition_id: str, task_names: list[str]) -> bool:
        what = f"check_consumption_status(partition={partition_id!r})"
        return self._look(what, p.Consumed(partition_id, task_names), bool)

    def count_samples(
        self, partition_id: str, task_name: str, required_fields: list[str]
    ) -> TaskCounts:
        what = f"count_samples(partition={partition_id!r})"
        return self._look(what, p.Count(partition_id, task_name, required_fields), TaskCounts)

    def read_origins(
        self, sample_ids: Sequence[str], partition_id: str, fields: Sequence[str]
    ) -> dict[str, int]:
        what = f"read_origins(partition={partition_id!r})"
        request = p.ReadOrigins(partition_id, list(sample_ids), list(fields))
        return self._look(what, request, dict[str, int])

    def list_partitions(self) -> list[PartitionSummary]:
        return self._look("list_partitions()", p.ListPartitions(), list[PartitionSummary])

    def list_samples(
        self, partition_id: str, *, start: int = 0, limit: int = 100
    ) -> list[SampleState]:
        def ask(start: int, limit: int) -> list[SampleState]:
            what = f"list_samples(partition={partition_id!r})"
            return self._look(what, p.ListSamples(partition_id, start, limit), list[SampleState])

        return in_steps(start, limit, ask)

    def read_sample(self, partition_id: str, sample_id: str) -> SampleState | None:
        what = f"read_sample(partition={partition_id!r})"
        request = p.ReadSample(partition_id, sample_id)
        found: SampleState | None = self._look(what, request, p.MaybeSample)
        return found

    def find_samples(
        self, partition_id: str, *, tag: str, value: object, limit: int = 100
    ) -> list[SampleState]:
        wanted = checked_value(tag, value, limit)
        what = f"find_samples(partition={partition_id!r})"
        found: list[SampleState] = []
        start: int | None = 0
        while start is not None:
            request = p.FindSamples(partition_id, tag, wanted, start, limit - len(found))
            step = self._look(what, request, p.FoundSamples)
            found += step.samples
            start = step.after
        return found

    def list_claims(self, partition_id: str) -> list[ClaimSummary]:
        what = f"list_claims(partition={partition_id!r})"
        return self._look(what, p.ListClaims(partition_id), list[ClaimSummary])

    def list_shares(self, partition_id: str) -> list[ShareSummary]:
        what = f"list_shares(partition={partition_id!r})"
        return self._look(what, p.ListShares(partition_id), list[ShareSummary])

    def scan_states(self, partition_id: str, *, start: int = 0, limit: int = 10_000) -> StatePage:
        what = f"scan_states(partition={partition_id!r})"
        return self._look(what, p.ScanStates(partition_id, start, limit), StatePage)

    def list_storage(self) -> list[StorageSummary]:
        return self._look("list_storage()", p.ListStorage(), list[StorageSummary])

    def read_totals(self) -> dict[str, int]:
        return self._look("read_totals()", p.ReadTotals(), dict[str, int])

    def reset_consumption(self, partition_id: str, task_name: str, sample_ids: list[str]) -> int:
        """As `DataPlaneActions.reset_consumption`.

        Claims are decided by the directory, so the samples are handed out again. TransferQueue's
        own controller cannot take back the consumption of single samples: what it was told, or is
        just being told, it goes on to report as consumed by the task, to its tools and metrics and
        to clients of its own; what waits for a put that it does not know yet, it is not told.
        """
        what = f"reset_consumption(partition={partition_id!r}, task={task_name!r})"
        return self._look(what, p.ResetConsumption(partition_id, task_name, sample_ids), int)

    def end_claim(self, partition_id: str, claim: str, *, expired_only: bool = True) -> int:
        what = f"end_claim(partition={partition_id!r}, claim={claim!r})"
        return self._look(what, p.EndClaim(partition_id, claim, expired_only), int)
