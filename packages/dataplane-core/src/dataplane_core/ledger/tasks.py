"""What one task of a partition has claimed, and under which leases."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from typing import Any  # Any: a request's parts, by which shares are kept

from dataplane_core.declaration import tagged_lengths
from dataplane_core.ledger.queues import Queue
from dataplane_core.ledger.rows import Row


@dataclass
class Lease:
    """A claim that is not settled yet; ``rows`` shrinks as parts of it are.

    Attributes:
        token: what settles it, known to the claimer alone.
        name: what everybody may know it by; it does not tell the token.
        task_name: the claiming task.
        owner: the claiming process, as the claim gave it.
        rows: the samples, by id.
        since: when it was claimed.
        deadline: when it runs out unless it is renewed.
        seconds: its length.
    """

    token: str
    name: str
    task_name: str
    owner: str
    rows: dict[str, Row]
    since: float
    deadline: float
    seconds: float


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
        assigned: drawn for a data-parallel rank that has not asked for its share yet.
        leased: claimed under a lease, by the lease's token.
        settled: claimed for good.
        queues: the ready ones of ``open``, by required fields and seed.
        shares: the batches that wait for their ranks.
    """

    open: dict[str, Row] = field(default_factory=dict)
    assigned: dict[str, Row] = field(default_factory=dict)
    leased: dict[str, str] = field(default_factory=dict)
    settled: set[str] = field(default_factory=set)
    queues: dict[tuple[frozenset[str], int | None], Queue] = field(default_factory=dict)
    shares: dict[Any, list[deque[list[Row]]]] = field(default_factory=dict)
    _returned: list[tuple[int, str]] = field(default_factory=list)

    def assign(self, rows: list[Row]) -> None:
        """Rows that were drawn wait for their rank."""
        self.assigned.update((row.sample_id, row) for row in rows)
        self._note(rows)

    def reopen(self, rows: list[Row]) -> None:
        """Rows that were claimed can be claimed again; the queues are the caller's business."""
        self.open.update((row.sample_id, row) for row in rows)
        self._note(rows)

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
        return self.open.get(sample_id) or self.assigned.get(sample_id)

    def _note(self, rows: list[Row]) -> None:
        for row in rows:
            heapq.heappush(self._returned, (row.sequence, row.sample_id))
        if len(self._returned) > 2 * (len(self.open) + len(self.assigned)) + 64:
            # Entries may be out of date, or there twice.
            found = (self._unclaimed(sample_id) for _, sample_id in self._returned)
            valid = {(row.sequence, row.sample_id) for row in found if row is not None}
            self._returned = sorted(valid)
