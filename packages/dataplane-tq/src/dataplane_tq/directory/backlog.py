"""`Backlog`: changes to one partition that TransferQueue has yet to receive.

The directory applies a clear at once; the client then drops the rows in TransferQueue. Until then
their ids cannot be put again. If that client dies, the next put or clear drops the rows. The
directory also shows a put at once; the client may report its rows to TransferQueue later, and with
them the claims made in between.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from dataplane_core.ledger import Row
from dataplane_tq.directory.protocol import Consumption, Orphans

Fields = dict[str, tuple[str, ...]]
"""Fields that each sample has in TransferQueue, by sample id."""


class Backlog:
    """Rows of one partition that TransferQueue has yet to drop or to receive.

    Args:
        mirrored: whether the store has a mirror; if False, there are no orphans.

    Attributes:
        orphans: rows to drop in TransferQueue, not yet assigned to a connection.
        pinned: cleared rows that a read still needs, by sample id.
        dropping: samples that a connection is dropping in TransferQueue.
        closing: number of connections that are dropping the entire partition.
        reporting: sample id to the number of its reports to TransferQueue that are under way.
        unreported: task to the samples in ``reporting`` that it has consumed.
    """

    def __init__(self, *, mirrored: bool = True) -> None:
        self.orphans: Fields = {}
        self.pinned: dict[str, Row] = {}
        self.dropping: set[str] = set()
        self.closing = 0
        self.reporting: Counter[str] = Counter()
        self.unreported: dict[str, set[str]] = {}
        self._mirrored = mirrored

    def __bool__(self) -> bool:
        return bool(self.orphans or self.pinned or self.dropping or self.closing or self.reporting)

    def reported(self, sample_ids: Sequence[str]) -> list[Consumption]:
        """End one report of the samples; return the consumption that can be reported now."""
        self.reporting.subtract(sample_ids)
        finished = {sample_id for sample_id in sample_ids if self.reporting[sample_id] <= 0}
        for sample_id in finished:
            del self.reporting[sample_id]
        consumed = []
        for task_name, waiting in list(self.unreported.items()):
            if ready := waiting & finished:
                consumed.append(Consumption(task_name, sorted(ready)))
                self.forget_consumption(task_name, ready)
        return consumed

    def consume(self, task_name: str, sample_ids: Sequence[str]) -> list[str]:
        """Return the consumed samples that TransferQueue has; remember the others."""
        if not self.reporting:
            return list(sample_ids)
        waiting = {sample_id for sample_id in sample_ids if sample_id in self.reporting}
        if waiting:
            self.unreported.setdefault(task_name, set()).update(waiting)
        return [sample_id for sample_id in sample_ids if sample_id not in waiting]

    def forget_consumption(self, task_name: str, sample_ids: Iterable[str]) -> None:
        """Forget that the task consumed the samples."""
        waiting = self.unreported.get(task_name)
        if waiting is not None:
            waiting.difference_update(sample_ids)
            if not waiting:
                del self.unreported[task_name]

    def drop(self, rows: Iterable[Row], held: set[str]) -> None:
        """Record rows as cleared; add to ``held`` the samples that a read still needs."""
        for row in rows:
            if row.pins:
                self.pinned[row.sample_id] = row
                held.add(row.sample_id)
            elif self._mirrored:
                self.orphans[row.sample_id] = tuple(row.cells)

    def _release(self) -> None:
        """Drop pinned rows that no read needs any more."""
        free = [row for row in self.pinned.values() if row.pins == 0]
        for row in free:
            del self.pinned[row.sample_id]
        self.drop(free, set())

    def take(self, only: Sequence[str] | None = None, *, limit: int = 0) -> Fields:
        """Assign orphans to a connection, which drops them in TransferQueue.

        With ``only``, these samples are assigned; otherwise up to ``limit`` of all orphans.
        """
        self._release()
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

    def blocks_put(self, sample_ids: Sequence[str]) -> bool:
        """Return True if a drop, or a read of cleared rows, blocks a put of the samples."""
        if self.closing:
            return True
        self._release()
        if not (self.dropping or self.pinned):
            return False
        return any(
            sample_id in self.dropping or sample_id in self.pinned for sample_id in sample_ids
        )

    def blocks_commit(self, sample_ids: Sequence[str]) -> bool:
        """Return True if another put of the samples must be reported before this one is committed.

        The controller retains the cells that were reported last, so reports must arrive in the
        order of the puts. The mirror reports no cells, so its reports need no order.
        """
        return not (self._mirrored or self.reporting.keys().isdisjoint(sample_ids))


def grouped(samples: Fields) -> list[Orphans]:
    """Group samples by their fields."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for sample_id, fields in samples.items():
        groups.setdefault(fields, []).append(sample_id)
    return [Orphans(ids, list(fields)) for fields, ids in groups.items()]
