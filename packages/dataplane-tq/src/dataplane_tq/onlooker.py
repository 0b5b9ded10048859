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
from dataplane_core.arguments import checked_bool, checked_names
from dataplane_core.boundary import check_consumption, check_look, check_read
from dataplane_core.ledger.inspect import check_page, in_steps
from dataplane_core.ledger.scan import check_search
from dataplane_tq import protocol as p

T = TypeVar("T")


class Onlooker(DataPlaneClient):
    """The inspector's methods and the actions, each one request to the directory."""

    @abstractmethod
    def _look(self, what: str, request: p.Request, answer: type[T]) -> T:
        """One request that belongs to no operation; ``what`` names it in errors."""

    def check_consumption_status(self, partition_id: str, task_names: list[str]) -> bool:
        partition_id, task_names = check_consumption(partition_id, task_names)
        what = f"check_consumption_status(partition={partition_id!r})"
        return self._look(what, p.Consumed(partition_id, task_names), bool)

    def count_samples(
        self, partition_id: str, task_name: str, required_fields: list[str]
    ) -> TaskCounts:
        partition_id, task_name = check_look("count_samples", partition_id, task_name=task_name)
        what = f"count_samples(partition={partition_id!r})"
        fields = checked_names(what, "required_fields", required_fields)
        return self._look(what, p.Count(partition_id, task_name, fields), TaskCounts)

    def read_origins(
        self, sample_ids: Sequence[str], partition_id: str, fields: Sequence[str]
    ) -> dict[str, int]:
        read = check_read("read_origins", sample_ids, partition_id, fields)
        request = p.ReadOrigins(read.partition_id, read.sample_ids, read.fields)
        return self._look(read.where, request, dict[str, int])

    def list_partitions(self) -> list[PartitionSummary]:
        return self._look("list_partitions()", p.ListPartitions(), list[PartitionSummary])

    def list_samples(
        self, partition_id: str, *, start: int = 0, limit: int = 100
    ) -> list[SampleState]:
        (partition_id,) = check_look("list_samples", partition_id)

        def ask(start: int, limit: int) -> list[SampleState]:
            what = f"list_samples(partition={partition_id!r})"
            return self._look(what, p.ListSamples(partition_id, start, limit), list[SampleState])

        return in_steps(start, limit, ask)

    def read_sample(self, partition_id: str, sample_id: str) -> SampleState | None:
        partition_id, sample_id = check_look("read_sample", partition_id, sample_id=sample_id)
        what = f"read_sample(partition={partition_id!r})"
        request = p.ReadSample(partition_id, sample_id)
        found: SampleState | None = self._look(what, request, p.MaybeSample)
        return found

    def find_samples(
        self, partition_id: str, *, tag: str, value: object, limit: int = 100
    ) -> list[SampleState]:
        partition_id, tag = check_look("find_samples", partition_id, tag=tag)
        wanted, limit = check_search(tag, value, limit)
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
        (partition_id,) = check_look("list_claims", partition_id)
        what = f"list_claims(partition={partition_id!r})"
        return self._look(what, p.ListClaims(partition_id), list[ClaimSummary])

    def list_shares(self, partition_id: str) -> list[ShareSummary]:
        (partition_id,) = check_look("list_shares", partition_id)
        what = f"list_shares(partition={partition_id!r})"
        return self._look(what, p.ListShares(partition_id), list[ShareSummary])

    def scan_states(self, partition_id: str, *, start: int = 0, limit: int = 10_000) -> StatePage:
        (partition_id,) = check_look("scan_states", partition_id)
        start, limit = check_page("scan_states", start, limit)
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
        method = "reset_consumption"
        partition_id, task_name = check_look(method, partition_id, task_name=task_name)
        what = f"{method}(partition={partition_id!r}, task={task_name!r})"
        ids = checked_names(what, "sample_ids", sample_ids)
        return self._look(what, p.ResetConsumption(partition_id, task_name, ids), int)

    def end_claim(self, partition_id: str, claim: str, *, expired_only: bool = True) -> int:
        partition_id, claim = check_look("end_claim", partition_id, claim=claim)
        expired_only = checked_bool("end_claim", "expired_only", expired_only)
        what = f"end_claim(partition={partition_id!r}, claim={claim!r})"
        return self._look(what, p.EndClaim(partition_id, claim, expired_only), int)
