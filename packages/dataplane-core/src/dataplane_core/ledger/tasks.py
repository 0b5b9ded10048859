"""What one task of a partition has claimed, and under which leases."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from dataplane_core.declaration import tagged_lengths
from dataplane_core.ledger.queues import Queue
from dataplane_core.ledger.rows import Row
from dataplane_core.ledger.selection import RankGroup, TagFilter

_IDLE = 0.25
"""The part of what is open of which a queue may be told in vain."""

QueueKey: TypeAlias = tuple[frozenset[str], frozenset[TagFilter], int | None]
"""Required fields, conditions and seed of claims."""


@dataclass
class Lease:
    """A claim that is not settled yet; ``rows`` shrinks as parts of it are.

    Attributes:
        token: what settles it, known to the claimer alone.
        name: what everybody may know it by; it does not tell the token.
        task_name: the claiming task.
        owner: the claiming process, as the claim gave it.
        claimed: the ids of all samples that it began with.
        rows: the samples, by id.
        since: when it was claimed.
        deadline: when it expires unless it is renewed.
        seconds: its length.
        rank: the data-parallel rank that claimed, in its group; None for a claim of no rank.
    """

    token: str
    name: str
    task_name: str
    owner: str
    claimed: frozenset[str]
    rows: dict[str, Row]
    since: float
    deadline: float
    seconds: float
    rank: tuple[RankGroup, int] | None = None


@dataclass(eq=False)
class Share:
    """A batch that was drawn for a data-parallel rank that has not asked for it yet.

    Attributes:
        task_name: the claiming task.
        group: the ranks that share what is drawn.
        rank: whose it is.
        rows: the samples, by id; those that are claimed, cleared or reopened leave it.
        deadline: when they are open to all again, on the caller's clock.
        seconds: from the rank's last sign of life to ``deadline``; infinite if a final claim drew.
        seen: when the rank last gave a sign of life; None if it gave none since the draw.
    """

    task_name: str
    group: RankGroup
    rank: int
    rows: dict[str, Row]
    deadline: float = math.inf
    seconds: float = math.inf
    seen: float | None = None


@dataclass
class Claimed:
    """What a claim got.

    Attributes:
        rows: the samples.
        token: of the lease, None for a final claim or an empty one.
    """

    rows: list[Row]
    token: str | None

    @property
    def sequence_lengths(self) -> list[int] | None:
        """As `KVBatchMeta` has them: from the tags."""
        return tagged_lengths([row.tags for row in self.rows])


@dataclass
class Task:
    """One task's view; a present sample is in exactly one of open, assigned, leased, settled.

    Attributes:
        open: not claimed.
        assigned: drawn for a data-parallel rank that has not asked for it yet, with its share.
        leased: claimed under a lease, by the lease's token.
        settled: claimed for good, with the token of the lease, None for a final claim.
        queues: the ready ones of ``open``, by required fields, conditions and seed; the one that
            was claimed from last comes last.
        counted: the last count of ready samples: at which revision, which fields, and how many.
        shares: those of ``assigned`` by group and rank, in the order of their draws.
        missed: present samples that were drawn once for a rank that did not ask for them in time.
    """

    open: dict[str, Row] = field(default_factory=dict)
    assigned: dict[str, Share] = field(default_factory=dict)
    leased: dict[str, str] = field(default_factory=dict)
    settled: dict[str, str | None] = field(default_factory=dict)
    queues: dict[QueueKey, Queue] = field(default_factory=dict)
    counted: tuple[int, frozenset[str], int] = (0, frozenset(), 0)
    shares: dict[RankGroup, list[dict[Share, None]]] = field(default_factory=dict)
    missed: set[str] = field(default_factory=set)
    _returned: list[tuple[int, str]] = field(default_factory=list)

    def assign(self, share: Share) -> None:
        """Rows that were drawn wait for their rank."""
        self.assigned.update(dict.fromkeys(share.rows, share))
        waiting = self.shares.setdefault(share.group, [{} for _ in range(share.group.world)])
        waiting[share.rank][share] = None
        self._note(list(share.rows.values()))

    def unassign(self, share: Share, sample_ids: list[str]) -> list[Row]:
        """Rows of a share wait no longer; one that is empty then is forgotten."""
        rows = [share.rows.pop(sample_id) for sample_id in sample_ids]
        for sample_id in sample_ids:
            del self.assigned[sample_id]
        if not share.rows:
            waiting = self.shares[share.group]
            del waiting[share.rank][share]
            if not any(waiting):
                del self.shares[share.group]
        return rows

    def first_share(self, group: RankGroup, rank: int) -> Share | None:
        """What was drawn for a rank first, of what waits for it."""
        waiting = self.shares.get(group)
        return next(iter(waiting[rank]), None) if waiting else None

    def reopen(self, rows: list[Row]) -> None:
        """Rows that were claimed can be claimed again; the queues are the caller's business."""
        self.open.update((row.sample_id, row) for row in rows)
        self._note(rows)

    def tell(self, rows: Sequence[Row]) -> None:
        """Tell the queues of open rows, new or changed, after those that idle have been dropped.

        A filter that moves, as one on the weights' version does, leaves a queue behind with every
        step. To make one anew costs a look at all that is open: one idles when it was told of a
        part of that since it was claimed from last. The one that was claimed from last of all
        stays.
        """
        for key, queue in list(self.queues.items())[:-1]:
            if queue.terms.unseen is None and queue.terms.told > len(self.open) * _IDLE:
                del self.queues[key]
        for queue in self.queues.values():
            for row in rows:
                queue.add(row)

    def oldest_unclaimed(self) -> Row | None:
        """The row of ``open`` and ``assigned`` that was put first."""
        # Rows enter ``open`` in the order of first puts, so its first row is the oldest of those
        # that never left; those that came back, or wait, are in a heap.
        first = next(iter(self.open.values()), None)
        while self._returned:
            sequence, sample_id = self._returned[0]
            row = self._unclaimed(sample_id)
            if row is not None and row.sequence == sequence:
                return row if first is None or sequence < first.sequence else first
            heapq.heappop(self._returned)
        return first

    def _unclaimed(self, sample_id: str) -> Row | None:
        share = self.assigned.get(sample_id)
        return self.open.get(sample_id) if share is None else share.rows[sample_id]

    def _note(self, rows: list[Row]) -> None:
        for row in rows:
            heapq.heappush(self._returned, (row.sequence, row.sample_id))
        if len(self._returned) > 2 * (len(self.open) + len(self.assigned)) + 64:
            # Entries may be out of date, or there twice.
            found = (self._unclaimed(sample_id) for _, sample_id in self._returned)
            valid = {(row.sequence, row.sample_id) for row in found if row is not None}
            self._returned = sorted(valid)
