"""What the directory tells onlookers, and what they may change by hand.

Each handler answers at once, from the directory's thread, where nobody else is served meanwhile; so
none may take longer than a page of samples does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any  # Any: answers differ by request

from dataplane_core import (
    ClaimSummary,
    PartitionSummary,
    SampleState,
    ShareSummary,
    StatePage,
    StorageSummary,
    TaskCounts,
)
from dataplane_core.ledger import PartitionBook, actions, inspect
from dataplane_core.ledger.scan import check_search, scan, search
from dataplane_tq import protocol as p

if TYPE_CHECKING:
    from dataplane_tq.directory import Directory


def _partition(directory: Directory, partition_id: str) -> PartitionBook:
    directory.expire()
    return directory.ledger.partition(partition_id)


def _consumed(directory: Directory, request: p.Consumed) -> bool:
    directory.expire()
    partition = directory.ledger.partitions.get(request.partition_id)
    return partition is not None and partition.consumed(request.task_names)


async def _count(directory: Directory, request: p.Count) -> TaskCounts:
    partition = _partition(directory, request.partition_id)
    while not partition.prepare_counts(request.task_name, request.required_fields):
        await asyncio.sleep(0)
        partition = _partition(directory, request.partition_id)
    return partition.counts(request.task_name, request.required_fields)


def _read_origins(directory: Directory, request: p.ReadOrigins) -> dict[str, int]:
    partition = directory.ledger.partition(request.partition_id)
    return partition.origins(request.sample_ids, request.fields)


def _list_partitions(directory: Directory, request: p.ListPartitions) -> list[PartitionSummary]:
    directory.expire()
    now = time.monotonic()
    return [inspect.summarise(book, now) for book in directory.ledger.partitions.values()]


def _list_samples(directory: Directory, request: p.ListSamples) -> list[SampleState]:
    partition = _partition(directory, request.partition_id)
    return inspect.page(partition, request.start, request.limit, time.monotonic())


def _read_sample(directory: Directory, request: p.ReadSample) -> SampleState | None:
    partition = _partition(directory, request.partition_id)
    return inspect.sample(partition, request.sample_id, time.monotonic())


def _find_samples(directory: Directory, request: p.FindSamples) -> p.FoundSamples:
    check_search(request.tag, request.value, request.limit)
    found, after = search(
        _partition(directory, request.partition_id),
        request.tag,
        request.value,
        request.start,
        request.limit,
        time.monotonic(),
    )
    return p.FoundSamples(found, after)


def _list_claims(directory: Directory, request: p.ListClaims) -> list[ClaimSummary]:
    return inspect.claims(_partition(directory, request.partition_id), time.monotonic())


def _list_shares(directory: Directory, request: p.ListShares) -> list[ShareSummary]:
    return inspect.shares(_partition(directory, request.partition_id), time.monotonic())


def _scan_states(directory: Directory, request: p.ScanStates) -> StatePage:
    return scan(_partition(directory, request.partition_id), request.start, request.limit)


def _list_storage(directory: Directory, request: p.ListStorage) -> list[StorageSummary]:
    return [] if directory.catalogue is None else directory.catalogue.usage()


def _read_totals(directory: Directory, request: p.ReadTotals) -> dict[str, int]:
    directory.expire()
    return dict(directory.ledger.totals)


def _reset_consumption(directory: Directory, request: p.ResetConsumption) -> int:
    partition = _partition(directory, request.partition_id)
    reset = actions.reset_consumption(partition, request.task_name, request.sample_ids)
    left = directory.leftovers.get(request.partition_id)
    if left is not None:
        left.unconsume(request.task_name, reset)
    directory.changed(request.partition_id)
    return len(reset)


def _end_claim(directory: Directory, request: p.EndClaim) -> int:
    # Not through `_partition`: a lease that is over, and not yet noticed, is to be counted.
    partition = directory.ledger.partition(request.partition_id)
    count = actions.end_claim(
        partition, request.claim, time.monotonic(), expired_only=request.expired_only
    )
    directory.changed(request.partition_id)
    return count


LOOKS: dict[type[Any], Callable[[Directory, Any], Any]] = {
    p.Consumed: _consumed,
    p.Count: _count,
    p.ReadOrigins: _read_origins,
    p.ListPartitions: _list_partitions,
    p.ListSamples: _list_samples,
    p.ReadSample: _read_sample,
    p.FindSamples: _find_samples,
    p.ListClaims: _list_claims,
    p.ListShares: _list_shares,
    p.ScanStates: _scan_states,
    p.ListStorage: _list_storage,
    p.ReadTotals: _read_totals,
    p.ResetConsumption: _reset_consumption,
    p.EndClaim: _end_claim,
}
"""What answers each request that belongs to no put, read, claim or clear under way."""
