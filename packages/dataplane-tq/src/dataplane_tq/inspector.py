"""`DirectoryInspector`: queries to the directory, and changes by an operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from dataplane_core import (
    AssignmentSummary,
    ClaimSummary,
    PartitionSummary,
    SampleState,
    StatePage,
    StorageSummary,
    TaskCounts,
)
from dataplane_core.arguments import checked_bool, checked_names
from dataplane_core.boundary import check_inspection
from dataplane_core.ledger.inspect import check_page, read_in_steps
from dataplane_core.ledger.scan import check_search
from dataplane_tq.directory import protocol as p

T = TypeVar("T")


class Ask(Protocol):
    """Function that sends one request outside of any operation."""

    def __call__(self, what: str, request: p.Request, answer: type[T]) -> T:
        """Send ``request`` and return its answer; ``what`` names it in errors."""


class DirectoryInspector:
    """Inspector of a client: each method sends requests to the directory.

    Args:
        ask: `TQDataPlaneClient._ask_open`.
        clear_samples: `TQDataPlaneClient.clear_samples`.
    """

    def __init__(self, ask: Ask, clear_samples: Callable[..., None]) -> None:
        self._ask = ask
        self.clear_samples = clear_samples

    def _query(self, method: str, request: p.Request, answer: type[T]) -> T:
        partition_id = getattr(request, "partition_id", None)
        arguments = "" if partition_id is None else f"partition={partition_id!r}"
        return self._ask(f"{method}({arguments})", request, answer)

    def count_samples(
        self, partition_id: str, task_name: str, required_fields: list[str]
    ) -> TaskCounts:
        partition_id, task_name = check_inspection(
            "count_samples", partition_id, task_name=task_name
        )
        operation = f"count_samples(partition={partition_id!r})"
        fields = checked_names(operation, "required_fields", required_fields)
        return self._query("count_samples", p.Count(partition_id, task_name, fields), TaskCounts)

    def list_partitions(self) -> list[PartitionSummary]:
        return self._query("list_partitions", p.ListPartitions(), list[PartitionSummary])

    def list_samples(
        self, partition_id: str, *, start: int = 0, limit: int = 100
    ) -> list[SampleState]:
        (partition_id,) = check_inspection("list_samples", partition_id)

        def ask(start: int, limit: int) -> list[SampleState]:
            request = p.ListSamples(partition_id, start, limit)
            return self._query("list_samples", request, list[SampleState])

        return read_in_steps(start, limit, ask)

    def read_sample(self, partition_id: str, sample_id: str) -> SampleState | None:
        partition_id, sample_id = check_inspection("read_sample", partition_id, sample_id=sample_id)
        request = p.ReadSample(partition_id, sample_id)
        sample: SampleState | None = self._query("read_sample", request, p.MaybeSample)
        return sample

    def find_samples(
        self, partition_id: str, *, tag: str, value: object, limit: int = 100
    ) -> list[SampleState]:
        partition_id, tag = check_inspection("find_samples", partition_id, tag=tag)
        wanted, limit = check_search(tag, value, limit)
        samples: list[SampleState] = []
        start: int | None = 0
        while start is not None:
            request = p.FindSamples(partition_id, tag, wanted, start, limit - len(samples))
            step = self._query("find_samples", request, p.FoundSamples)
            samples += step.samples
            start = step.after
        return samples

    def list_claims(self, partition_id: str) -> list[ClaimSummary]:
        (partition_id,) = check_inspection("list_claims", partition_id)
        return self._query("list_claims", p.ListClaims(partition_id), list[ClaimSummary])

    def list_assignments(self, partition_id: str) -> list[AssignmentSummary]:
        (partition_id,) = check_inspection("list_assignments", partition_id)
        return self._query(
            "list_assignments", p.ListAssignments(partition_id), list[AssignmentSummary]
        )

    def scan_states(self, partition_id: str, *, start: int = 0, limit: int = 10_000) -> StatePage:
        (partition_id,) = check_inspection("scan_states", partition_id)
        start, limit = check_page("scan_states", start, limit)
        return self._query("scan_states", p.ScanStates(partition_id, start, limit), StatePage)

    def list_storage(self) -> list[StorageSummary]:
        return self._query("list_storage", p.ListStorage(), list[StorageSummary])

    def read_totals(self) -> dict[str, int]:
        return self._query("read_totals", p.ReadTotals(), dict[str, int])

    def reset_consumption(self, partition_id: str, task_name: str, sample_ids: list[str]) -> int:
        """Reset consumption as `DataPlaneActions.reset_consumption` does.

        The directory decides claims, so the samples can be claimed again. TransferQueue's own
        controller cannot undo the consumption of single samples. It still shows them as consumed if
        a client has reported that to the controller, or is reporting it now.
        """
        method = "reset_consumption"
        partition_id, task_name = check_inspection(method, partition_id, task_name=task_name)
        ids = checked_names(method, "sample_ids", sample_ids)
        return self._query(method, p.ResetConsumption(partition_id, task_name, ids), int)

    def end_claim(self, partition_id: str, claim: str, *, expired_only: bool = True) -> int:
        partition_id, claim = check_inspection("end_claim", partition_id, claim=claim)
        expired_only = checked_bool("end_claim", "expired_only", expired_only)
        return self._query("end_claim", p.EndClaim(partition_id, claim, expired_only), int)
