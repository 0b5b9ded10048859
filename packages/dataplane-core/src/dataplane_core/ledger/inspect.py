"""What an onlooker sees of a ledger: summaries that cost nothing, claims, and pages of samples.

Ages are seconds at the moment of looking, on the clock of the ledger's own process, so that they
mean the same wherever they are sent.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any  # Any: tags hold the caller's own primitives

from dataplane_core.errors import InvalidRequestError
from dataplane_core.ledger.partition import PartitionBook
from dataplane_core.ledger.rows import Row
from dataplane_core.ledger.tasks import Lease

LARGEST_PAGE = 10_000
"""Rows of one page of samples or states."""

_STEP = 1_000

MOST_CLAIMS = 1_000
"""Claims of one answer."""


@dataclass(frozen=True, kw_only=True)
class FieldSummary:
    """One field of a partition: its kind (None until written) and how many samples have it.

    ``nbytes`` are the bytes of its values, without padding; None where the store cannot tell, as of
    Python values in memory.
    """

    name: str
    kind: str | None
    declared: bool
    written: int
    nbytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class ClaimSummary:
    """One claim under a lease that was not settled yet.

    Attributes:
        claim: its name, for `DataPlaneActions.end_claim`; not the token that settles it.
        task: the claiming task.
        owner: "host:pid" of the process that claimed; empty if it did not say.
        samples: how many it still holds.
        age_s: since it was claimed, in seconds.
        expires_in_s: until its lease runs out, in seconds, at least 0.
    """

    claim: str
    task: str
    owner: str
    samples: int
    age_s: float
    expires_in_s: float


@dataclass(frozen=True, kw_only=True)
class TaskSummary:
    """One task of a partition: how many present samples are where.

    ``oldest_unclaimed_s`` is the age of the unclaimed sample that was put first, in seconds, and
    ``oldest_claim`` the claim under a lease that is held longest; None if there is none.
    """

    name: str
    unclaimed: int
    leased: int
    settled: int
    leases: int
    oldest_unclaimed_s: float | None = None
    oldest_claim: ClaimSummary | None = None


@dataclass(frozen=True, kw_only=True)
class PartitionSummary:
    """One partition in numbers; making it costs fields, tasks and claims, not samples.

    Attributes:
        partition_id: its name.
        declared: samples that are to be put.
        put: samples put since the registration.
        present: samples that are there.
        reserved: samples of puts under way.
        group_size: samples per prompt, or None.
        fields: those declared and those written.
        tasks: those declared.
        enums: vocabularies of string columns.
        nbytes: of the fields of which it is known; None where the store cannot tell of any.
        revision: grows with every change; of equal ones only ages and times to go differ.
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
    """One sample.

    Attributes:
        sample_id: its id.
        fields: those written.
        tags: the caller's primitives.
        tasks: task to its state of the sample: unclaimed, assigned, leased or settled.
        origins: field to the name of the put that wrote it.
        age_s: since it was first put, in seconds; None if that is not known.
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
    """Where samples stand, a byte for each, in the order of first puts.

    Attributes:
        total: samples of the partition.
        start: place of the page's first sample.
        fields: names of the columns of ``written``.
        tasks: names of the columns of ``states``.
        written: row-major, samples x fields: 1 if the sample has the field, else 0.
        states: row-major, samples x tasks: 0 unclaimed, 1 assigned, 2 leased, 3 settled.
    """

    total: int
    start: int
    fields: tuple[str, ...]
    tasks: tuple[str, ...]
    written: bytes
    states: bytes


@dataclass(frozen=True, kw_only=True)
class StorageSummary:
    """One storage unit: its name, its node, and its bytes; of a full one little is ``free``."""

    name: str
    node: str
    capacity: int
    used: int
    free: int


def field_names(partition: PartitionBook) -> tuple[str, ...]:
    """The declared fields and then the others that are written."""
    return tuple(dict.fromkeys([*partition.declaration.fields, *partition.field_counts]))


def summarise(partition: PartitionBook, now: float) -> PartitionSummary:
    """The numbers of one partition at the moment ``now`` of `time.monotonic`."""
    declared = partition.declaration.fields
    counts = partition.field_counts
    leases: dict[str, int] = {}
    oldest: dict[str, Lease] = {}
    for lease in partition.leases.values():  # in the order of their claims
        leases[lease.task_name] = leases.get(lease.task_name, 0) + 1
        oldest.setdefault(lease.task_name, lease)
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
                kind=partition.kinds.get(name),
                declared=name in declared,
                written=counts.get(name, 0),
                nbytes=partition.sizes.of(name, counts.get(name, 0)),
            )
            for name in field_names(partition)
        ),
        tasks=tuple(
            TaskSummary(
                name=name,
                unclaimed=len(task.open) + len(task.assigned),
                leased=len(task.leased),
                settled=len(task.settled),
                leases=leases.get(name, 0),
                oldest_unclaimed_s=_age(task.oldest_unclaimed(), now),
                oldest_claim=describe(oldest[name], now) if name in oldest else None,
            )
            for name, task in partition.tasks.items()
        ),
        enums=partition.declaration.enums,
        nbytes=partition.sizes.total,
        revision=partition.revision,
    )


def _age(row: Row | None, now: float) -> float | None:
    return None if row is None else max(0.0, now - row.put_at)


def describe(lease: Lease, now: float) -> ClaimSummary:
    """A lease as an onlooker sees it."""
    return ClaimSummary(
        claim=lease.name,
        task=lease.task_name,
        owner=lease.owner,
        samples=len(lease.rows),
        age_s=max(0.0, now - lease.since),
        expires_in_s=max(0.0, lease.deadline - now),
    )


def claims(partition: PartitionBook, now: float) -> list[ClaimSummary]:
    """The claims under leases, the oldest first, at most `MOST_CLAIMS`."""
    oldest = itertools.islice(partition.leases.values(), MOST_CLAIMS)
    return [describe(lease, now) for lease in oldest]


def check_page(what: str, start: int, limit: int) -> None:
    """Raise `InvalidRequestError` on a page that starts before the first row or is too large."""
    if start < 0 or not 0 <= limit <= LARGEST_PAGE:
        raise InvalidRequestError(
            f"{what}: start {start}, limit {limit}; expected a start of at least 0 and a limit of "
            f"at most {LARGEST_PAGE}"
        )


def page(partition: PartitionBook, start: int, limit: int, now: float) -> list[SampleState]:
    """Up to ``limit`` samples from place ``start`` on, in the order of first puts.

    Some microseconds each: see `in_steps`.

    Raises:
        InvalidRequestError: as `check_page`.
    """
    check_page("list_samples", start, limit)
    rows = itertools.islice(partition.rows.values(), start, start + limit)
    return [state_of(partition, row, now) for row in rows]


def in_steps(
    start: int, limit: int, ask: Callable[[int, int], list[SampleState]]
) -> list[SampleState]:
    """A page put together from smaller ones, between which others use the books.

    Args:
        start: place of the first sample.
        limit: most samples.
        ask: gives a page from a start and a limit.

    Raises:
        InvalidRequestError: as `check_page`.
    """
    check_page("list_samples", start, limit)
    found = ask(start, min(limit, _STEP))
    while len(found) < limit:
        more = ask(start + len(found), min(limit - len(found), _STEP))
        if not more:
            break
        found += more
    return found


def sample(partition: PartitionBook, sample_id: str, now: float) -> SampleState | None:
    """One sample; None if it is not there."""
    row = partition.rows.get(sample_id)
    return None if row is None else state_of(partition, row, now)


def state_of(partition: PartitionBook, row: Row, now: float) -> SampleState:
    """What is known of a sample of ``partition``."""
    tasks: dict[str, str] = {}
    held: dict[str, str] = {}
    for name, task in partition.tasks.items():
        token = task.leased.get(row.sample_id)
        if token is not None:
            tasks[name] = "leased"
            held[name] = partition.leases[token].name
        elif row.sample_id in task.open:
            tasks[name] = "unclaimed"
        else:
            tasks[name] = "assigned" if row.sample_id in task.assigned else "settled"
    return SampleState(
        sample_id=row.sample_id,
        fields=tuple(row.cells),
        tags=dict(row.tags),
        tasks=tasks,
        origins=dict(row.origins),
        age_s=_age(row, now),
        claims=held,
    )
