"""Live signs of a stuck run: a task that claims nothing, a claim without acknowledgment."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
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
MAX_SIGNS = 20
"""Maximum number of signs; each costs a few queries to the data plane."""


@dataclass(frozen=True)
class Stuck:
    """One sign that a run is stuck.

    Attributes:
        samples: unclaimed samples, assigned ones included; or samples held by the claim.
        seconds: age of the oldest of these samples, or of the claim.
        idle_s: seconds for which the task has claimed nothing; 0 for a claim.
        lacks: field to unclaimed samples that lack it; empty for a claim.
        examples: ids of some of the samples.
        claim: the claim, None for unclaimed samples.
        blocked_claim_fields: fields that a blocked claim of the task requires; None without a
            blocked claim.
    """

    partition_id: str
    task: str
    samples: int
    present: int
    seconds: float
    idle_s: float = 0.0
    lacks: Mapping[str, int] = field(default_factory=dict)
    examples: tuple[str, ...] = ()
    claim: ClaimSummary | None = None
    blocked_claim_fields: tuple[str, ...] | None = None


def find_stuck(
    inspector: DataPlaneInspector,
    partitions: Iterable[PartitionSummary],
    trends: Mapping[str, Trend],
    scans: Mapping[str, Scan],
    after_s: float,
    has_claimed: Callable[[str, str], bool],
) -> tuple[Stuck, ...]:
    """Return signs older than ``after_s``: blocked claims first, then others, each oldest first.

    Unclaimed samples do not count for a task that reads by key and never claims. The polls show
    which tasks claim; ``has_claimed`` knows about earlier claims of a partition and task.
    """
    signs: list[Stuck] = []
    claiming: set[tuple[str, str]] = set()
    for partition in partitions:
        trend = trends.get(partition.partition_id, Trend())
        scan = scans.get(partition.partition_id)
        claiming.update((partition.partition_id, task) for task in trend.claiming)
        claiming.update(
            (partition.partition_id, task.name)
            for task in partition.tasks
            if task.blocked_claim_fields is not None
        )
        for task in partition.tasks:
            backlog = _backlog(partition, task, trend, scan, after_s)
            if backlog is not None:
                signs.append(backlog)
            claim = task.oldest_claim
            if claim is not None and claim.age_s >= after_s:
                signs.append(_old_claim(partition, task, claim))
    signs.sort(key=lambda sign: (sign.blocked_claim_fields is None, -sign.seconds))
    # Lazy: `has_claimed` is called in this order, and not beyond `MAX_SIGNS`.
    shown = (
        sign
        for sign in signs
        if sign.claim is not None
        or (sign.partition_id, sign.task) in claiming
        or has_claimed(sign.partition_id, sign.task)
    )
    return tuple(_with_examples(inspector, sign, scans) for sign in islice(shown, MAX_SIGNS))


def _backlog(
    partition: PartitionSummary,
    task: TaskSummary,
    trend: Trend,
    scan: Scan | None,
    after_s: float,
) -> Stuck | None:
    age_s = task.oldest_unclaimed_s
    numbers = trend.tasks.get(task.name)
    unclaimed = task.unclaimed + task.assigned
    if age_s is None or age_s < after_s or not unclaimed or numbers is None:
        return None
    # A deep queue that makes progress has old samples as well.
    idle_s = trend.unchanged_s(numbers.claimed)
    if idle_s < min(after_s, trend.seconds):
        return None
    lacks = {}
    if scan is not None:
        unclaimed_rows = scan.unclaimed(task.name)
        needs = task.blocked_claim_fields
        if needs is None:
            needs = tuple(field.name for field in partition.fields if field.declared)
        for name in needs:
            count = int((unclaimed_rows & scan.lacking(name)).sum())
            if count:
                lacks[name] = count
    return Stuck(
        partition_id=partition.partition_id,
        task=task.name,
        samples=unclaimed,
        present=partition.present,
        seconds=age_s,
        idle_s=idle_s,
        lacks=lacks,
        blocked_claim_fields=task.blocked_claim_fields,
    )


def _old_claim(partition: PartitionSummary, task: TaskSummary, claim: ClaimSummary) -> Stuck:
    return Stuck(
        partition_id=partition.partition_id,
        task=task.name,
        samples=claim.samples,
        present=partition.present,
        seconds=claim.age_s,
        claim=claim,
    )


def _with_examples(inspector: DataPlaneInspector, stuck: Stuck, scans: Mapping[str, Scan]) -> Stuck:
    scan = scans.get(stuck.partition_id)
    if scan is None:
        return stuck
    if stuck.claim:
        rows = scan.leased(stuck.task)
    else:
        rows = scan.unclaimed(stuck.task)
        lacking = [scan.lacking(name) for name in stuck.lacks]
        if lacking:
            rows = rows & np.logical_or.reduce(lacking)
    ids = []
    # Other claims of the task may hold some of the leased samples.
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
    return replace(stuck, examples=tuple(ids))


def _first(rows: npt.NDArray[np.bool_], maximum: int) -> list[int]:
    return [int(place) for place in np.flatnonzero(rows)[:maximum]]
