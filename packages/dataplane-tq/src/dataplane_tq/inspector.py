"""`DirectoryInspector`: queries to the directory, and changes by an operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any  # Any: answers differ by method

from dataplane_core import (
    AssignmentSummary,
    ClaimSummary,
    PartitionSummary,
    SampleState,
    StatePage,
    StorageSummary,
    TaskCounts,
)
from dataplane_core.checked_inspector import CheckedInspector
from dataplane_tq.directory import protocol as p

_QUERIES: dict[str, tuple[Callable[..., p.Request], Any]] = {
    "count_samples": (p.Count, TaskCounts),
    "list_partitions": (p.ListPartitions, list[PartitionSummary]),
    "list_samples": (p.ListSamples, list[SampleState]),
    "read_sample": (p.ReadSample, SampleState | None),
    "find_samples": (p.FindSamples, tuple[list[SampleState], int | None]),
    "list_claims": (p.ListClaims, list[ClaimSummary]),
    "list_assignments": (p.ListAssignments, list[AssignmentSummary]),
    "scan_states": (p.ScanStates, StatePage),
    "list_storage": (p.ListStorage, list[StorageSummary]),
    "read_totals": (p.ReadTotals, dict[str, int]),
    "reset_consumption": (p.ResetConsumption, int),
    "end_claim": (p.EndClaim, int),
}
"""Request and type of the answer, by method."""


class DirectoryInspector(CheckedInspector):
    """Inspector of a client: each method sends requests to the directory.

    The directory decides claims, so samples can be claimed again after `reset_consumption`.
    TransferQueue's own controller cannot undo the consumption of single samples. It still shows
    them as consumed if a client has reported that to the controller, or is reporting it now.

    Args:
        ask: `TQDataPlaneClient._ask_open`.
        clear_samples: `TQDataPlaneClient.clear_samples`.
    """

    def __init__(self, ask: Callable[..., Any], clear_samples: Callable[..., None]) -> None:
        super().__init__(clear_samples)
        self._ask = ask

    def _query(self, method: str, *arguments: Any) -> Any:
        request, answer = _QUERIES[method]
        partition = f"partition={arguments[0]!r}" if arguments else ""
        return self._ask(f"{method}({partition})", request(*arguments), answer)
