"""`CheckedInspector`: base of inspectors of stores whose state is in a ledger."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any  # Any: answers differ by method

from dataplane_core.arguments import checked_bool, checked_names
from dataplane_core.boundary import check_inspection
from dataplane_core.ledger.inspect import check_page, read_in_steps
from dataplane_core.ledger.scan import check_search

if TYPE_CHECKING:
    from dataplane_core.capabilities import TaskCounts
    from dataplane_core.ledger.inspect import (
        AssignmentSummary,
        ClaimSummary,
        PartitionSummary,
        SampleState,
        StatePage,
        StorageSummary,
    )


class CheckedInspector(ABC):
    """Inspector that checks its arguments, and reads large results in steps.

    Args:
        clear_samples: the client's method.
    """

    def __init__(self, clear_samples: Callable[..., None]) -> None:
        self.clear_samples = clear_samples

    @abstractmethod
    def _query(self, method: str, *arguments: Any) -> Any:
        """Return the store's answer to a call of ``method`` with these checked arguments.

        ``list_samples`` and ``find_samples`` are queried in steps. The answer of ``find_samples``
        is a pair: the matches, and the position of the next step, which is None at the end.
        """

    def list_partitions(self) -> list[PartitionSummary]:
        return self._query("list_partitions")

    def list_storage(self) -> list[StorageSummary]:
        return self._query("list_storage")

    def read_totals(self) -> dict[str, int]:
        return self._query("read_totals")

    def count_samples(
        self, partition_id: str, task_name: str, required_fields: list[str]
    ) -> TaskCounts:
        method = "count_samples"
        partition_id, task_name = check_inspection(method, partition_id, task_name=task_name)
        operation = f"{method}(partition={partition_id!r})"
        fields = checked_names(operation, "required_fields", required_fields)
        return self._query(method, partition_id, task_name, fields)

    def list_samples(
        self, partition_id: str, *, start: int = 0, limit: int = 100
    ) -> list[SampleState]:
        (partition_id,) = check_inspection("list_samples", partition_id)
        return read_in_steps(start, limit, partial(self._query, "list_samples", partition_id))

    def read_sample(self, partition_id: str, sample_id: str) -> SampleState | None:
        names = check_inspection("read_sample", partition_id, sample_id=sample_id)
        return self._query("read_sample", *names)

    def find_samples(
        self, partition_id: str, *, tag: str, value: object, limit: int = 100
    ) -> list[SampleState]:
        names = check_inspection("find_samples", partition_id, tag=tag)
        value, limit = check_search(tag, value, limit)
        samples: list[SampleState] = []
        start: int | None = 0
        while start is not None:
            step = value, start, limit - len(samples)
            matches, start = self._query("find_samples", *names, *step)
            samples += matches
        return samples

    def list_claims(self, partition_id: str) -> list[ClaimSummary]:
        method = "list_claims"
        return self._query(method, *check_inspection(method, partition_id))

    def list_assignments(self, partition_id: str) -> list[AssignmentSummary]:
        names = check_inspection("list_assignments", partition_id)
        return self._query("list_assignments", *names)

    def scan_states(self, partition_id: str, *, start: int = 0, limit: int = 10_000) -> StatePage:
        method = "scan_states"
        names = check_inspection(method, partition_id)
        return self._query(method, *names, *check_page(method, start, limit))

    def reset_consumption(self, partition_id: str, task_name: str, sample_ids: list[str]) -> int:
        method = "reset_consumption"
        names = check_inspection(method, partition_id, task_name=task_name)
        ids = checked_names(method, "sample_ids", sample_ids)
        return self._query(method, *names, ids)

    def end_claim(self, partition_id: str, claim: str, *, expired_only: bool = True) -> int:
        method = "end_claim"
        names = check_inspection(method, partition_id, claim=claim)
        return self._query(method, *names, checked_bool(method, "expired_only", expired_only))
