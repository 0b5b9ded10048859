"""Handlers of the directory for inspectors: queries, and changes by an operator.

The directory's only thread runs each handler, and serves no other request until the handler returns
or awaits. So no handler may run longer between two awaits than the handler of `ListSamples`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any  # Any: answers differ by request

import msgspec

from dataplane_core import PartitionSummary, TaskCounts
from dataplane_core.ledger import Partition, actions, inspect
from dataplane_core.ledger.scan import check_search, scan, search
from dataplane_tq.directory import protocol as p
from dataplane_tq.directory.store_state import StoreState


def _partition(store: StoreState, partition_id: str) -> Partition:
    store.expire()
    return store.ledger.partition(partition_id)


def _handler(query: Callable[..., Any], *, timed: bool = True) -> Callable[[StoreState, Any], Any]:
    """Make a handler that calls ``query`` with the partition and the request's other fields.

    If ``timed``, the time is the last argument.
    """

    def answer(store: StoreState, request: Any) -> Any:
        fields = msgspec.structs.asdict(request)
        partition = _partition(store, fields.pop("partition_id"))
        return query(partition, *fields.values(), *([time.monotonic()] if timed else []))

    return answer


def _consumed(store: StoreState, request: p.Consumed) -> bool:
    store.expire()
    partition = store.ledger.partitions.get(request.partition_id)
    return partition is not None and partition.all_acknowledged(request.task_names)


async def _count(store: StoreState, request: p.Count) -> TaskCounts:
    partition = _partition(store, request.partition_id)
    while not partition.prepare_counts(request.task_name, request.required_fields):
        await asyncio.sleep(0)
        partition = _partition(store, request.partition_id)
    return partition.counts(request.task_name, request.required_fields)


def _list_partitions(store: StoreState, request: p.ListPartitions) -> list[PartitionSummary]:
    store.expire()
    now = time.monotonic()
    return [inspect.summarize(each, now) for each in store.ledger.partitions.values()]


def _find_samples(store: StoreState, request: p.FindSamples) -> Any:
    check_search(request.tag, request.value, request.limit)
    return _handler(search)(store, request)


def _read_totals(store: StoreState, request: p.ReadTotals) -> dict[str, int]:
    store.expire()
    return dict(store.ledger.totals)


def _reset_consumption(store: StoreState, request: p.ResetConsumption) -> int:
    partition = _partition(store, request.partition_id)
    reset = actions.reset_consumption(partition, request.task_name, request.sample_ids)
    if (backlog := store.backlog.get(request.partition_id)) is not None:
        backlog.forget_consumption(request.task_name, reset)
    store.changed(request.partition_id)
    return len(reset)


def _end_claim(store: StoreState, request: p.EndClaim) -> int:
    # `_partition` would expire a lease that is due, but the lease must be counted here.
    partition = store.ledger.partition(request.partition_id)
    count = actions.end_claim(
        partition, request.claim, time.monotonic(), expired_only=request.expired_only
    )
    store.changed(request.partition_id)
    return count


INSPECTIONS: dict[type[Any], Callable[[StoreState, Any], Any]] = {
    p.Consumed: _consumed,
    p.Count: _count,
    p.ReadOrigins: _handler(
        lambda partition, *names: partition.samples.origins(*names), timed=False
    ),
    p.ListPartitions: _list_partitions,
    p.ListSamples: _handler(inspect.page),
    p.ReadSample: _handler(inspect.sample),
    p.FindSamples: _find_samples,
    p.ListClaims: _handler(inspect.claims),
    p.ListAssignments: _handler(inspect.assignments),
    p.ScanStates: _handler(scan, timed=False),
    p.ListStorage: lambda store, _: [] if store.catalogue is None else store.catalogue.usage(),
    p.ReadTotals: _read_totals,
    p.ResetConsumption: _reset_consumption,
    p.EndClaim: _end_claim,
}
"""Handlers by request type, for requests that belong to no put, read, claim or clear."""
