"""Views of a ledger for inspectors: summaries, claims, and pages of samples.

Ages are in seconds and computed by the ledger's process, so that they need no shared clock.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any  # Any: tags hold the caller's own primitives

from dataplane_core.arguments import checked_int
from dataplane_core.ledger.assignments import Assignment
from dataplane_core.ledger.leases import Lease
from dataplane_core.ledger.partition import Partition
from dataplane_core.ledger.rows import Row
from dataplane_core.schema import Form

MAX_PAGE_ROWS = 10_000
"""Maximum rows of one page of samples or states."""

_STEP = 1_000

_STATES = ("unclaimed", "assigned", "leased", "acknowledged")
"""Names of the states, indexed by `Task.code`."""

MAX_CLAIMS = 1_000
"""Maximum claims, or assignments, of one list."""


@dataclass(frozen=True, kw_only=True)
class FieldSummary:
    """One field of a partition: its kind (None until written) and how many samples have it.

    ``nbytes`` is the size of its values without padding; None if the store does not know it, as for
    Python values in memory. ``form`` is a `dataplane_core.schema.Form`; None if the rows are dense
    or Python values.
    """

    name: str
    kind: str | None
    declared: bool
    written: int
    nbytes: int | None = None
    form: Form | None = None


@dataclass(frozen=True, kw_only=True)
class ClaimSummary:
    """One leased claim that is not fully acknowledged yet.

    Attributes:
        claim: its name, for `DataPlaneActions.end_claim`; not the token that acknowledges it.
        task: the claiming task.
        owner: "host:pid" of the claiming process; empty if unknown.
        samples: number of samples that it still holds.
        age_s: seconds since it was claimed.
        expires_in_s: seconds until its lease expires, at least 0.
        rank: data-parallel rank that claimed; None for a claim without a rank.
    """

    claim: str
    task: str
    owner: str
    samples: int
    age_s: float
    expires_in_s: float
    rank: int | None = None


@dataclass(frozen=True, kw_only=True)
class AssignmentSummary:
    """Samples assigned to one data-parallel rank, which has not claimed them yet.

    Attributes:
        task: the claiming task.
        rank: the rank to which the samples are assigned.
        world: number of ranks that share each drawn batch.
        samples: number of samples.
        expires_in_s: seconds until the first of the samples becomes open to all, at least 0; a
            claim or renewal by the rank restarts the time. None if they were drawn without a lease.
        seen_s: seconds since the rank last claimed or renewed; None if it has done neither since
            the first of the samples was drawn.
    """

    task: str
    rank: int
    world: int
    samples: int
    expires_in_s: float | None
    seen_s: float | None


@dataclass(frozen=True, kw_only=True)
class TaskSummary:
    """One task of a partition: the number of present samples in each state, and its leases.

    Attributes:
        name: name of the task.
        unclaimed: can be claimed, now or once they have their fields.
        assigned: assigned to data-parallel ranks; `TaskCounts.leased` counts them as leased.
        leased: held under a lease.
        acknowledged: acknowledged, or claimed without a lease.
        leases: number of claims that hold the leased samples.
        oldest_unclaimed_s: age of the oldest unclaimed or assigned sample, in seconds; None if
            there is none.
        oldest_claim: the oldest claim under a lease; None if there is none.
        holders: process ("host:pid") to the number of leased samples that it holds.
        blocked_claim_fields: fields that a blocked claim of the task requires; None if no claim is
            known to be blocked.
    """

    name: str
    unclaimed: int
    assigned: int = 0
    leased: int
    acknowledged: int
    leases: int
    oldest_unclaimed_s: float | None = None
    oldest_claim: ClaimSummary | None = None
    holders: dict[str, int] = field(default_factory=dict)
    blocked_claim_fields: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class PartitionSummary:
    """Summary of one partition; its cost grows with fields, tasks and claims, not with samples.

    Attributes:
        partition_id: name of the partition.
        declared: number of samples that will be put, as declared.
        put: number of samples present at the latest registration, plus those put since, minus
            withdrawn ones.
        present: number of samples in the store.
        reserved: number of samples of running puts.
        group_size: samples per prompt, or None.
        fields: the declared and the written fields.
        tasks: the declared tasks.
        enums: vocabularies of string columns.
        nbytes: bytes of the fields whose size is known; None if the store knows none.
        revision: grows with every change; between equal revisions only ages and expiries differ.
    """

    partition_id: str
    declared: int
    put: int
    present: int
    reserved: int
    group_size: int | None
    fields: tuple[FieldSummary, ...]
    tasks: tuple[TaskSummary, ...]
    enums: dict[str, tuple[str, ...]] = field(default_factory=dict)
    nbytes: int | None = None
    revision: int = 0


@dataclass(frozen=True, kw_only=True)
class SampleState:
    """One sample: its fields, tags, and state for each task.

    Attributes:
        sample_id: the sample's id.
        fields: the written fields.
        tags: the caller's primitives.
        tasks: task to the sample's state: unclaimed, assigned, leased or acknowledged.
        origins: field to the name of the put that wrote it.
        age_s: seconds since it was first put; None if unknown.
        claims: task to the name of the claim that holds the sample.
    """

    sample_id: str
    fields: tuple[str, ...]
    tags: dict[str, Any]
    tasks: dict[str, str]
    origins: dict[str, str] = field(default_factory=dict)
    age_s: float | None = None
    claims: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class StatePage:
    """Fields and states of samples in the order of first puts, one byte per field or state.

    Attributes:
        total: number of samples of the partition.
        start: position of the page's first sample.
        fields: names of the columns of ``written``.
        tasks: names of the columns of ``states``.
        written: row-major, samples x fields: 1 if the sample has the field, else 0.
        states: row-major, samples x tasks: 0 unclaimed, 1 assigned, 2 leased, 3 acknowledged.
    """

    total: int
    start: int
    fields: tuple[str, ...]
    tasks: tuple[str, ...]
    written: bytes
    states: bytes


@dataclass(frozen=True, kw_only=True)
class StorageSummary:
    """One storage unit.

    Attributes:
        name: name of the unit.
        node: node on which it runs.
        capacity: bytes that it can hold; None if they are not limited.
        used: bytes that it holds, or the memory of its process if its values' sizes are unknown.
        free: bytes that a put can still use; None if they are not limited.
        samples: number of samples; None if the unit does not count them.
        max_samples: limit of ``samples``; None if there is none.
    """

    name: str
    node: str
    capacity: int | None
    used: int
    free: int | None
    samples: int | None = None
    max_samples: int | None = None


def field_names(partition: Partition) -> tuple[str, ...]:
    """Return the declared fields, then the other written ones."""
    return tuple(dict.fromkeys([*partition.declaration.fields, *partition.samples.field_counts]))


def summarize(partition: Partition, now: float) -> PartitionSummary:
    """Return the summary of one partition at the time ``now`` of `time.monotonic`."""
    declared = partition.declaration.fields
    counts = partition.samples.field_counts
    leases: dict[str, int] = {}
    holders: dict[str, Counter[str]] = defaultdict(Counter)
    oldest: dict[str, Lease] = {}
    for lease in partition.leases.values():  # oldest first
        leases[lease.task.name] = leases.get(lease.task.name, 0) + 1
        holders[lease.task.name][lease.owner] += len(lease.rows)
        oldest.setdefault(lease.task.name, lease)
    return PartitionSummary(
        partition_id=partition.declaration.partition_id,
        declared=partition.declaration.num_samples,
        put=partition.put_total,
        present=len(partition.rows),
        reserved=len(partition.reserved),
        group_size=partition.declaration.grpo_group_size,
        fields=tuple(
            FieldSummary(
                name=name,
                kind=partition.samples.kinds.get(name),
                declared=name in declared,
                written=counts.get(name, 0),
                nbytes=partition.samples.sizes.of(name, counts.get(name, 0)),
                form=partition.samples.forms.get(name),
            )
            for name in field_names(partition)
        ),
        tasks=tuple(
            TaskSummary(
                name=name,
                unclaimed=task.open,
                assigned=task.assigned,
                leased=task.leased,
                acknowledged=task.acknowledged,
                leases=leases.get(name, 0),
                oldest_unclaimed_s=_age(task.oldest_unclaimed(partition.rows), now),
                oldest_claim=describe(oldest[name], now) if name in oldest else None,
                holders=dict(holders.get(name, {})),
            )
            for name, task in partition.tasks.items()
        ),
        enums=partition.declaration.enums,
        nbytes=partition.samples.sizes.total,
        revision=partition.revision,
    )


def _age(row: Row | None, now: float) -> float | None:
    return None if row is None else max(0.0, now - row.put_at)


def describe(lease: Lease, now: float) -> ClaimSummary:
    """Return the summary of a lease."""
    return ClaimSummary(
        claim=lease.name,
        task=lease.task.name,
        owner=lease.owner,
        samples=len(lease.rows),
        age_s=max(0.0, now - lease.since),
        expires_in_s=max(0.0, lease.deadline - now),
        rank=lease.rank,
    )


def claims(partition: Partition, now: float) -> list[ClaimSummary]:
    """Return up to `MAX_CLAIMS` claims under leases, oldest first."""
    oldest = itertools.islice(partition.leases.values(), MAX_CLAIMS)
    return [describe(lease, now) for lease in oldest]


def assignments(partition: Partition, now: float) -> list[AssignmentSummary]:
    """Return up to `MAX_CLAIMS` summaries of assignments, by task, `Ranks` and rank."""
    assigned = (
        _describe_assigned(name, list(ranked), now)
        for name, task in partition.tasks.items()
        for sets in task.assignments.by_ranks.values()
        for ranked in sets
        if ranked
    )
    return list(itertools.islice(assigned, MAX_CLAIMS))


def _describe_assigned(task: str, assigned: list[Assignment], now: float) -> AssignmentSummary:
    first = assigned[0]  # drawn first, so its ``seen`` covers all activity of the rank
    deadline = min(each.deadline for each in assigned)
    return AssignmentSummary(
        task=task,
        rank=first.rank,
        world=first.ranks.world,
        samples=sum(len(each.rows) for each in assigned),
        expires_in_s=None if deadline == math.inf else max(0.0, deadline - now),
        seen_s=None if first.seen is None else max(0.0, now - first.seen),
    )


def check_page(operation: str, start: object, limit: object) -> tuple[int, int]:
    """Return ``start`` and ``limit`` as plain ints.

    Raises:
        InvalidRequestError: (a ValueError) a number is not an int, or is out of bounds.
    """
    return checked_int(operation, "start", start), checked_int(
        operation, "limit", limit, maximum=MAX_PAGE_ROWS
    )


def page(partition: Partition, start: int, limit: int, now: float) -> list[SampleState]:
    """Return up to ``limit`` samples from position ``start`` on, in the order of first puts.

    A sample takes some microseconds; `read_in_steps` reads large pages.

    Raises:
        InvalidRequestError: as `check_page`.
    """
    start, limit = check_page("list_samples", start, limit)
    return [state_of(partition, row, now) for row in partition.rows.page(start, limit)]


def read_in_steps(
    start: int, limit: int, read_page: Callable[[int, int], list[SampleState]]
) -> list[SampleState]:
    """Return a page, read in steps of up to 1,000 samples; other calls can run in between.

    Args:
        start: position of the first sample.
        limit: maximum number of samples.
        read_page: returns a page from a start and a limit.

    Raises:
        InvalidRequestError: as `check_page`.
    """
    start, limit = check_page("list_samples", start, limit)
    samples = read_page(start, min(limit, _STEP))
    while len(samples) < limit:
        more = read_page(start + len(samples), min(limit - len(samples), _STEP))
        if not more:
            break
        samples += more
    return samples


def sample(partition: Partition, sample_id: str, now: float) -> SampleState | None:
    """Return one sample; None if it is not present."""
    row = partition.rows.get(sample_id)
    return None if row is None else state_of(partition, row, now)


def state_of(partition: Partition, row: Row, now: float) -> SampleState:
    """Return the state of a sample of ``partition``."""
    tasks: dict[str, str] = {}
    held: dict[str, str] = {}
    for name, task in partition.tasks.items():
        tasks[name] = _STATES[task.code(row)]
        lease = task.lease_of(row)
        if lease is not None:
            held[name] = lease.name
    return SampleState(
        sample_id=row.sample_id,
        fields=tuple(row.cells),
        tags=dict(row.tags),
        tasks=tasks,
        origins=dict(row.origins),
        age_s=_age(row, now),
        claims=held,
    )
