"""Live signs that a run stands still: a task that claims nothing, a claim that nobody settles."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from dataplane_admin.live.scan import Scan
from dataplane_admin.live.trend import Trend
from dataplane_core import (
    ClaimSummary,
    DataPlaneInspector,
    PartitionNotFoundError,
    PartitionSummary,
    TaskSummary,
)

EXAMPLES = 3
MOST = 20
"""How many signs are told; each costs a few questions to the data plane."""


@dataclass(frozen=True)
class Stuck:
    """One sign.

    Attributes:
        partition_id: where.
        task: whose.
        samples: that nobody claimed, also those drawn for a rank; or held by the claim.
        there: samples in the partition.
        seconds: how old the oldest of them is, or the claim.
        idle_s: for how long the task is known to have claimed nothing; of a claim 0.
        lacks: field to unclaimed samples that lack it; of a claim empty.
        examples: ids of some of the samples.
        claim: the claim, None if the sign is about unclaimed samples.
    """

    partition_id: str
    task: str
    samples: int
    there: int
    seconds: float
    idle_s: float
    lacks: Mapping[str, int]
    examples: tuple[str, ...]
    claim: ClaimSummary | None = None


def find_stuck(
    inspector: DataPlaneInspector,
    partitions: Iterable[PartitionSummary],
    trends: Mapping[str, Trend],
    scans: Mapping[str, Scan],
    after_s: float,
    has_claimed: Callable[[str, str], bool],
) -> tuple[Stuck, ...]:
    """The signs older than ``after_s``, the oldest first.

    A task that reads by key never claims, so that its samples are unclaimed says nothing. What
    claims is known from the polls, or by ``has_claimed`` of a partition and a task.
    """
    signs: list[Stuck] = []
    sure: set[tuple[str, str]] = set()
    for partition in partitions:
        trend = trends.get(partition.partition_id, Trend())
        scan = scans.get(partition.partition_id)
        sure.update((partition.partition_id, task) for task in trend.claiming)
        for task in partition.tasks:
            backlog = _backlog(partition, task, trend, scan, after_s)
            if backlog is not None:
                signs.append(backlog)
            claim = task.oldest_claim
            if claim is not None and claim.age_s >= after_s:
                signs.append(_held(partition, task, claim))
    signs.sort(key=lambda one: -one.seconds)
    # Asked in this order, and of no more than are told.
    told = (
        one
        for one in signs
        if one.claim is not None
        or (one.partition_id, one.task) in sure
        or has_claimed(one.partition_id, one.task)
    )
    return tuple(_with_examples(inspector, one, scans) for one in islice(told, MOST))


def _backlog(
    partition: PartitionSummary,
    task: TaskSummary,
    trend: Trend,
    scan: Scan | None,
    after_s: float,
) -> Stuck | None:
    age_s = task.oldest_unclaimed_s
    numbers = trend.tasks.get(task.name)
    waiting = task.unclaimed + task.assigned
    if age_s is None or age_s < after_s or not waiting or numbers is None:
        return None
    # A deep queue that is worked off has old samples as well.
    idle_s = trend.unchanged_s(numbers.taken)
    if idle_s < min(after_s, trend.seconds):
        return None
    lacks = {}
    if scan is not None:
        open_rows = scan.unclaimed(task.name)
        for held in partition.fields:
            count = int((open_rows & scan.lacking(held.name)).sum()) if held.declared else 0
            if count:
                lacks[held.name] = count
    return Stuck(
        partition_id=partition.partition_id,
        task=task.name,
        samples=waiting,
        there=partition.present,
        seconds=age_s,
        idle_s=idle_s,
        lacks=lacks,
        examples=(),
    )


def _held(partition: PartitionSummary, task: TaskSummary, claim: ClaimSummary) -> Stuck:
    return Stuck(
        partition_id=partition.partition_id,
        task=task.name,
        samples=claim.samples,
        there=partition.present,
        seconds=claim.age_s,
        idle_s=0.0,
        lacks={},
        examples=(),
        claim=claim,
    )


def _with_examples(inspector: DataPlaneInspector, stuck: Stuck, scans: Mapping[str, Scan]) -> Stuck:
    scan = scans.get(stuck.partition_id)
    if scan is None:
        return stuck
    rows = scan.leased(stuck.task) if stuck.claim else scan.unclaimed(stuck.task)
    ids = []
    for place in _first(rows, 4 * EXAMPLES if stuck.claim else EXAMPLES):
        try:
            states = inspector.list_samples(stuck.partition_id, start=place, limit=1)
        except PartitionNotFoundError:
            break
        for state in states:
            if stuck.claim is None or state.claims.get(stuck.task) == stuck.claim.claim:
                ids.append(state.sample_id)
        if len(ids) == EXAMPLES:
            break
    return Stuck(**{**vars(stuck), "examples": tuple(ids)})


def _first(rows: npt.NDArray[np.bool_], most: int) -> list[int]:
    return [int(place) for place in np.flatnonzero(rows)[:most]]
