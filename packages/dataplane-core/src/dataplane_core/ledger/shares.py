"""`ShareBook`: what was drawn for data-parallel ranks that have not asked for it yet.

A share waits for its rank and is lost to nobody: it is open to all again when the rank gives no
sign of life for as long as the lease of who drew it, when the partition is registered again or the
share is reset by hand, and, if a final claim drew it, when a claim on other terms finds nothing
else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from dataplane_core.ledger.leases import LeaseBook
from dataplane_core.ledger.rows import Row
from dataplane_core.ledger.selection import ClaimRequest, RankGroup
from dataplane_core.ledger.tasks import Share, Task


class ShareBook(LeaseBook):
    """What of a `PartitionBook` concerns shares."""

    _timed: dict[Share, None]

    def expire(self, now: float) -> bool:
        """End the leases and shares whose time is over; True if there were any."""
        over = [share for share in self._timed if share.deadline <= now]
        for share in over:
            self.tasks[share.task_name].missed.update(share.rows)
            self.reopen_shares(share.task_name, [share])
        return super().expire(now) or bool(over)

    def next_expiry(self) -> float | None:
        """When the next lease or share ends, on the caller's clock."""
        share = min((share.deadline for share in self._timed), default=None)
        lease = super().next_expiry()
        return share if lease is None or (share is not None and share < lease) else lease

    def renew(self, token: str, sample_ids: Sequence[str], now: float) -> None:
        """Start a lease anew, and with it what waits for its rank. Raises as `settle`."""
        super().renew(token, sample_ids, now)
        lease = self.leases[token]
        if lease.rank is not None:
            self._lives(self.tasks[lease.task_name], *lease.rank, now)

    def _lives(self, task: Task, group: RankGroup, rank: int, now: float) -> None:
        """A rank gave a sign of life: what waits for it waits on."""
        waiting = task.shares.get(group)
        for share in waiting[rank] if waiting else ():
            share.seen = now
            share.deadline = now + share.seconds

    def _take_share(
        self, task: Task, request: ClaimRequest, group: RankGroup, rank: int, now: float
    ) -> list[Row]:
        """What has waited for a rank longest, as much of it as the rank asks for now."""
        self._lives(task, group, rank, now)
        while (share := task.first_share(group, rank)) is not None:
            rows, _ = self._split(list(share.rows.values()), request.batch_size)
            if rows:
                return self.unassign(task, share, [row.sample_id for row in rows])
            # Nothing but groups that are too large for this rank: others may have room for them.
            self.reopen_shares(request.task_name, [share])
        return []

    def _split(self, rows: list[Row], limit: int) -> tuple[list[Row], list[Row]]:
        """Up to ``limit`` of the rows, without breaking groups up, and the others."""
        if len(rows) <= limit:
            return rows, []
        taken: list[Row] = []
        rest: list[Row] = []
        for unit in self._units(rows):
            (taken if len(taken) + len(unit) <= limit else rest).extend(unit)
        return taken, rest

    def _units(self, rows: Iterable[Row]) -> list[list[Row]]:
        """What must stay together: the groups, or each sample by itself."""
        if self.declaration.grpo_group_size is None:
            return [[row] for row in rows]
        groups: dict[str, list[Row]] = {}
        for row in rows:
            groups.setdefault(row.group, []).append(row)
        return list(groups.values())

    def _assign(
        self,
        task_name: str,
        group: RankGroup,
        rank: int,
        rows: Iterable[Row],
        lease_s: float | None,
        now: float,
    ) -> None:
        """Rows that were drawn for a rank wait for it."""
        seconds = math.inf if lease_s is None else lease_s
        by_id = {row.sample_id: row for row in rows}
        share = Share(task_name, group, rank, by_id, now + seconds, seconds)
        self.tasks[task_name].assign(share)
        if lease_s is not None:
            self._timed[share] = None

    def unassign(self, task: Task, share: Share, sample_ids: list[str]) -> list[Row]:
        """Samples of a share wait no longer for its rank; returns their rows."""
        rows = task.unassign(share, sample_ids)
        if not share.rows:
            self._timed.pop(share, None)
        return rows

    def reopen_shares(self, task_name: str, shares: Iterable[Share]) -> None:
        """Make what waits for ranks claimable by all."""
        task = self.tasks[task_name]
        for share in shares:
            self.reopen(task, self.unassign(task, share, list(share.rows)))

    def _timed_shares(self, task: Task) -> Iterator[Share]:
        """The task's shares that a time reopens."""
        return (share for share in self._timed if self.tasks[share.task_name] is task)

    def _untimed_shares(self, task: Task, but: RankGroup | None) -> list[Share]:
        """The shares that no time reopens, of other groups than ``but``."""
        return [
            share
            for group, waiting in task.shares.items()
            if group != but
            for share in (each for ranked in waiting for each in ranked)
            if share.deadline == math.inf
        ]
