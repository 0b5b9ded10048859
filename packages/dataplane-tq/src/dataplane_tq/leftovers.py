"""Where TransferQueue is behind the directory: rows that are to go, and rows that are to come.

A clear is decided in the directory at once; TransferQueue's rows go afterwards, by a client. Until
then their ids cannot be put again, and if that client dies the next one takes them over. A put is
visible in the directory at once; a client may tell TransferQueue of its rows afterwards, and of
what was claimed of them meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from dataplane_core.ledger import Row
from dataplane_tq.protocol import Consumption, Leftover

Drop = dict[str, tuple[str, ...]]
"""Samples to drop from TransferQueue, with the fields they had there."""


class Leftovers:
    """Rows of one partition that TransferQueue still has, or does not know yet.

    Attributes:
        orphans: those that nobody is dropping, with the fields they had.
        pinned: those that a read still needs.
        dropping: those that a connection is dropping.
        closing: how many connections are dropping the partition as a whole.
        entering: those that connections are telling TransferQueue of, and how many do.
        unreported: which of those each task has consumed.
    """

    def __init__(self) -> None:
        self.orphans: dict[str, tuple[str, ...]] = {}
        self.pinned: dict[str, Row] = {}
        self.dropping: set[str] = set()
        self.closing = 0
        self.entering: Counter[str] = Counter()
        self.unreported: dict[str, set[str]] = {}

    def __bool__(self) -> bool:
        return bool(self.orphans or self.pinned or self.dropping or self.closing or self.entering)

    def entered(self, sample_ids: Sequence[str]) -> list[Consumption]:
        """End what counts in ``entering``; returns what tasks consumed of it."""
        self.entering.subtract(sample_ids)
        known = {sample_id for sample_id in sample_ids if self.entering[sample_id] <= 0}
        for sample_id in known:
            del self.entering[sample_id]
        consumed = []
        for task_name, waiting in list(self.unreported.items()):
            mine = waiting & known
            if mine:
                consumed.append(Consumption(task_name, sorted(mine)))
                waiting -= mine
            if not waiting:
                del self.unreported[task_name]
        return consumed

    def consume(self, task_name: str, sample_ids: Sequence[str]) -> list[str]:
        """Which of the consumed samples TransferQueue knows; the others are remembered."""
        if not self.entering:
            return list(sample_ids)
        waiting = {sample_id for sample_id in sample_ids if sample_id in self.entering}
        if waiting:
            self.unreported.setdefault(task_name, set()).update(waiting)
        return [sample_id for sample_id in sample_ids if sample_id not in waiting]

    def unconsume(self, task_name: str, sample_ids: Sequence[str]) -> None:
        """Take back what `consume` remembers; what TransferQueue was told it keeps."""
        waiting = self.unreported.get(task_name)
        if waiting is not None:
            waiting.difference_update(sample_ids)
            if not waiting:
                del self.unreported[task_name]

    def settle(self) -> None:
        """Move rows whose reads have ended to the orphans."""
        free = [row for row in self.pinned.values() if row.pins == 0]
        for row in free:
            del self.pinned[row.sample_id]
            self.orphans[row.sample_id] = tuple(row.cells)

    def drop(self, rows: Iterable[Row], held: set[str]) -> None:
        """Rows were cleared; those that a read still needs are added to ``held``."""
        for row in rows:
            if row.pins:
                self.pinned[row.sample_id] = row
                held.add(row.sample_id)
            else:
                self.orphans[row.sample_id] = tuple(row.cells)

    def take(self, only: Sequence[str] | None = None, *, limit: int = 0) -> Drop:
        """Hand orphans to a connection to drop: those among ``only``, or up to ``limit`` of all."""
        self.settle()
        if only is None:
            taken = dict(self.orphans.popitem() for _ in range(min(limit, len(self.orphans))))
        else:
            taken = {
                sample_id: self.orphans.pop(sample_id)
                for sample_id in only
                if sample_id in self.orphans
            }
        self.dropping.update(taken)
        return taken

    def blocks(self, sample_ids: Sequence[str]) -> bool:
        """Whether one of the samples cannot be put before a drop has ended."""
        if self.closing:
            return True
        self.settle()
        if not (self.dropping or self.pinned):
            return False
        return any(
            sample_id in self.dropping or sample_id in self.pinned for sample_id in sample_ids
        )


def grouped(drop: Drop) -> list[Leftover]:
    """The samples of ``drop`` by the fields they had."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for sample_id, fields in drop.items():
        groups.setdefault(fields, []).append(sample_id)
    return [Leftover(ids, list(fields)) for fields, ids in groups.items()]
