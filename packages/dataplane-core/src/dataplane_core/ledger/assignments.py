"""`Assignments`: samples of one task that are assigned to data-parallel ranks.

One rank's claim draws a batch for all `Ranks` that share it and assigns their parts to the others::

    rank 0 of 2 claims 4 samples: drawn  [s0 s1 s2 s3 s4 s5 s6 s7]
                                  claimed by rank 0 [s0 s3 s4 s7], assigned to rank 1 [s1 s2 s5 s6]

Assigned samples become open to all again:

- when their rank neither claims nor renews for the length of the drawing claim's lease;
- when the partition is registered again, or an operator resets them;
- when they were drawn without a lease, and a claim with other fields, filter, seed or world finds
  nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from dataplane_core.ledger.rows import Holding, Row
from dataplane_core.ledger.selection import Ranks


@dataclass(eq=False)
class Assignment(Holding):
    """Samples assigned to a data-parallel rank, which has not claimed them yet.

    Attributes:
        ranks: the ranks that share each drawn batch.
        rank: the rank to which the samples are assigned.
        rows: the samples, by id; claimed, cleared and reopened ones are removed.
        deadline: when they become open to all, on the caller's clock.
        seconds: time from the rank's last activity to ``deadline``; infinite without a lease.
        seen: when the rank was last active; None if it has not been active since the draw.
    """

    ranks: Ranks
    rank: int
    rows: dict[str, Row]
    deadline: float = math.inf
    seconds: float = math.inf
    seen: float | None = None


class Assignments:
    """Assignments of one task, by `Ranks` and rank, in the order of the draws.

    Attributes:
        by_ranks: `Ranks` to one ordered set of assignments per rank.
        timed: assignments with a deadline.
        missed: present samples that were once assigned to a rank that did not claim them in time.
    """

    def __init__(self) -> None:
        self.by_ranks: dict[Ranks, list[dict[Assignment, None]]] = {}
        self.missed: set[str] = set()
        self.timed: dict[Assignment, None] = {}

    def __iter__(self) -> Iterator[Assignment]:
        return (each for sets in self.by_ranks.values() for assigned in sets for each in assigned)

    def untimed(self, excluded: Ranks | None) -> list[Assignment]:
        """Return the assignments without a deadline, except those of ``excluded``."""
        return [each for each in self if each.ranks != excluded and each not in self.timed]

    def add(self, assignment: Assignment) -> None:
        """Add an assignment; `take` removes it with its last sample."""
        ranks = assignment.ranks
        sets = self.by_ranks.setdefault(ranks, [{} for _ in range(ranks.world)])
        sets[assignment.rank][assignment] = None
        if assignment.deadline < math.inf:
            self.timed[assignment] = None

    def take(self, assignment: Assignment, sample_ids: Iterable[str]) -> list[Row]:
        """Remove samples from an assignment; return their rows."""
        rows = [assignment.rows.pop(sample_id) for sample_id in sample_ids]
        if not assignment.rows:
            sets = self.by_ranks[assignment.ranks]
            del sets[assignment.rank][assignment]
            self.timed.pop(assignment, None)
            if not any(sets):
                del self.by_ranks[assignment.ranks]
        return rows

    def first(self, ranks: Ranks, rank: int) -> Assignment | None:
        """Return the oldest assignment of a rank; None if it has none."""
        sets = self.by_ranks.get(ranks)
        return next(iter(sets[rank]), None) if sets else None

    def extend(self, ranks: Ranks, rank: int, now: float) -> None:
        """Restart the period of a rank's assignments, because the rank was active."""
        sets = self.by_ranks.get(ranks)
        for assignment in sets[rank] if sets else ():
            assignment.seen = now
            assignment.deadline = now + assignment.seconds


def indivisible_units(rows: Iterable[Row], by_group: bool) -> list[list[Row]]:
    """Return the rows in units that must stay together: groups, or single samples."""
    if not by_group:
        return [[row] for row in rows]
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    return list(groups.values())


def split(rows: list[Row], limit: int, by_group: bool) -> tuple[list[Row], list[Row]]:
    """Return up to ``limit`` of the rows without splitting a group, and the remaining rows."""
    if len(rows) <= limit:
        return rows, []
    taken: list[Row] = []
    rest: list[Row] = []
    for unit in indivisible_units(rows, by_group):
        (taken if len(taken) + len(unit) <= limit else rest).extend(unit)
    return taken, rest
