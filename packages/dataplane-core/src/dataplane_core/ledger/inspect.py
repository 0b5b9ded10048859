"""What an onlooker sees of a ledger: summaries that cost nothing, claims, and pages of samples.

Ages are seconds at the moment of looking, on the clock of the ledger's own process, so that they
mean the same wherever they are sent.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any  # Any: tags hold the caller's own primitives

from dataplane_core.arguments import checked_int
from dataplane_core.ledger.partition import PartitionBook
from dataplane_core.ledger.rows import Row
from dataplane_core.ledger.tasks import Lease, Share
from dataplane_core.schema import Form

LARGEST_PAGE = 10_000
"""Rows of one page of samples or states."""

_STEP = 1_000

MOST_CLAIMS = 1_000
"""Claims, or shares, of one answer."""


@dataclass(frozen=True, kw_only=True)
class FieldSummary:
    """One field of a partition: its kind (None until written) and how many samples have it.

    ``nbytes`` are the bytes of its values, without padding; None where the store cannot tell, as of
    Python values in memory. ``form`` is that of `dataplane_core.schema.Form`, None for fields whose
    rows are dense or Python values.
    """

    name: str
    kind: str | None
    declared: bool
    written: int
    nbytes: int | None = None
    form: Form | None = None


@dataclass(frozen=True, kw_only=True)
class ClaimSummary:
    """One claim under a lease that was not settled yet.

    Attributes:
        claim: its name, for `DataPlaneActions.end_claim`; not the token that settles it.
        task: the claiming task.
        owner: "host:pid" of the process that claimed; empty if it did not say.
        samples: how many it still holds.
        age_s: since it was claimed, in seconds.
        expires_in_s: until its lease expires, in seconds, at least 0.
        rank: data-parallel rank that claimed; None for a claim of no rank.
    """

    claim: str
    task: str
    owner: str
    samples: int
    age_s: float
    expires_in_s: float
    rank: int | None = None


@dataclass(frozen=True, kw_only=True)
class ShareSummary:
    """What waits for one data-parallel rank, which has not asked for it since it was drawn.

    Attributes:
        task: the claiming task.
        rank: whose it is.
        world: ranks that share what is drawn.
        samples: how many wait for it.
        expires_in_s: until the first of them are open to all unless the rank gives a sign of life,
            in seconds, at least 0; None of final claims, which no time opens.
        seen_s: since the rank last claimed, or renewed a claim, in seconds; None if it did neither
            since the first of them were drawn.
    """

    task: str
    rank: int
    world: int
    samples: int
    expires_in_s: float | None
    seen_s: float | None


@dataclass(frozen=True, kw_only=True)
class TaskSummary:
    """One task of a partition: how many present samples are where.

    Attributes:
        name: the task's.
        unclaimed: could be claimed, now or once they have their fields.
        assigned: drawn for data-parallel ranks that have not asked for them yet;
            `TaskCounts.leased` counts them as leased.
        leased: held under a lease.
        settled: claimed for good.
        leases: claims that hold the leased ones.
        oldest_unclaimed_s: age of the sample that was put first of those unclaimed or assigned, in
            seconds; None if there is none.
        oldest_claim: the claim under a lease that is held longest; None if there is none.
        holders: process ("host:pid") to how many of the leased samples it holds.
    """

    name: str
    unclaimed: int
    assigned: int = 0
    leased: int
    settled: int
    leases: int
    oldest_unclaimed_s: float | None = None
    oldest_claim: ClaimSummary | None = None
    holders: dict[str, int] = field(default_factory=dict)


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
    holders: dict[str, Counter[str]] = defaultdict(Counter)
    oldest: dict[str, Lease] = {}
    for lease in partition.leases.values():  # in the order of their claims
        leases[lease.task_name] = leases.get(lease.task_name, 0) + 1
        holders[lease.task_name][lease.owner] += len(lease.rows)
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
                form=partition.forms.get(name),
            )
            for name in field_names(partition)
        ),
        tasks=tuple(
            TaskSummary(
                name=name,
                unclaimed=len(task.open),
                assigned=len(task.assigned),
                leased=len(task.leased),
                settled=len(task.settled),
                leases=leases.get(name, 0),
                oldest_unclaimed_s=_age(task.oldest_unclaimed(), now),
                oldest_claim=describe(oldest[name], now) if name in oldest else None,
                holders=dict(holders.get(name, {})),
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
        rank=None if lease.rank is None else lease.rank[1],
    )


def claims(partition: PartitionBook, now: float) -> list[ClaimSummary]:
    """The claims under leases, the oldest first, at most `MOST_CLAIMS`."""
    oldest = itertools.islice(partition.leases.values(), MOST_CLAIMS)
    return [describe(lease, now) for lease in oldest]


def shares(partition: PartitionBook, now: float) -> list[ShareSummary]:
    """What waits for ranks, by task, terms of the claims, and rank; at most `MOST_CLAIMS`."""
    waiting = (
        _describe_shares(name, list(ranked), now)
        for name, task in partition.tasks.items()
        for ranks in task.shares.values()
        for ranked in ranks
        if ranked
    )
    return list(itertools.islice(waiting, MOST_CLAIMS))


def _describe_shares(task: str, waiting: list[Share], now: float) -> ShareSummary:
    first = waiting[0]  # drawn first, so that it has every later sign of life of the rank
    deadline = min(share.deadline for share in waiting)
    return ShareSummary(
        task=task,
        rank=first.rank,
        world=first.group.world,
        samples=sum(len(share.rows) for share in waiting),
        expires_in_s=None if deadline == math.inf else max(0.0, deadline - now),
        seen_s=None if first.seen is None else max(0.0, now - first.seen),
    )


def check_page(what: str, start: object, limit: object) -> tuple[int, int]:
    """Return ``start`` and ``limit`` as plain ints.

    Raises:
        InvalidRequestError: (a ValueError) one is no int, or out of bounds.
    """
    return checked_int(what, "start", start), checked_int(what, "limit", limit, most=LARGEST_PAGE)


def page(partition: PartitionBook, start: int, limit: int, now: float) -> list[SampleState]:
    """Up to ``limit`` samples from place ``start`` on, in the order of first puts.

    Some microseconds each: see `in_steps`.

    Raises:
        InvalidRequestError: as `check_page`.
    """
    start, limit = check_page("list_samples", start, limit)
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
    start, limit = check_page("list_samples", start, limit)
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
