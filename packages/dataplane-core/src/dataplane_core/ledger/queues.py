"""Queues of the samples that one task could claim, so that a claim costs what it takes.

A queue is told of each open sample when it is put or gains a field, and forgets it when it is
claimed or cleared; it never scans the partition, so its cost does not grow with what was consumed
before. A queue with conditions on tags looks at a sample's tags then, not at every claim.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from typing import Protocol

from dataplane_core.ledger.order import Places
from dataplane_core.ledger.rows import Row
from dataplane_core.ledger.selection import TagFilter


class Terms:
    """What a sample needs to be in a queue, and which samples may still come to meet it.

    Args:
        required: fields that it must have.
        where: conditions that its tags must all meet.

    Attributes:
        awaited: open samples, by their places in the order of puts, that meet ``where`` and lack a
            field; kept only if there are conditions.
        told: how many samples the queue was told of since it was claimed from last.
        unseen: the partition's rows, as far as the queue was not built from them yet; None once it
            is complete.
    """

    def __init__(self, required: frozenset[str], where: Iterable[TagFilter] = ()) -> None:
        self.required = required
        self.where = tuple(where)
        self.awaited: set[int] = set()
        self.told = 0
        self.unseen: Iterator[list[Row]] | None = None

    def meets(self, row: Row) -> bool:
        """Whether the sample's tags meet the conditions."""
        return all(condition.matches(row.tags) for condition in self.where)

    def ready(self, row: Row) -> bool:
        """Whether the sample has the fields; if not, it is awaited if its tags will do."""
        self.told += 1
        ready = self.required <= row.cells.keys()
        if self.where:
            if not ready and self.meets(row):
                self.awaited.add(row.sequence)
            else:
                self.awaited.discard(row.sequence)
        return ready


class Queue(Protocol):
    """The ready samples of one task, for claims on the same terms."""

    terms: Terms
    places: Places

    def __len__(self) -> int:
        """Ready samples, those of incomplete groups and of groups that do not match included."""

    def add(self, row: Row) -> None:
        """An open sample was put or changed; telling it again changes nothing."""

    def discard(self, row: Row) -> None:
        """A sample is no longer open, or never was."""

    def count(self, unit: int) -> int:
        """How many samples `take` could give without ``partial``."""

    def take(self, limit: int, *, unit: int, partial: bool) -> list[Row]:
        """Remove and return up to ``limit`` samples, of no group of more than ``unit``.

        ``partial`` takes incomplete groups too.
        """

    def shed(self, count: int) -> None:
        """Free what ``count`` samples take, of a queue that nobody claims from any more."""


class SampleQueue:
    """Samples one by one: a heap whose entries may be out of date, and the truth beside it.

    A sample that leaves and comes back with other tags may stand elsewhere than before, so an entry
    counts only where its sample stands now.
    """

    def __init__(self, terms: Terms, places: Places) -> None:
        self.terms = terms
        self.places = places
        self._ready: dict[int, tuple[float, Row]] = {}
        self._heap: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._ready)

    def add(self, row: Row) -> None:
        if not self.terms.ready(row):
            return
        if self.terms.where and not self.terms.meets(row):
            self._ready.pop(row.sequence, None)
            return
        if row.sequence in self._ready:
            return
        place = self.places.of(row)
        self._ready[row.sequence] = place, row
        heapq.heappush(self._heap, (place, row.sequence))
        if len(self._heap) > 2 * len(self._ready) + 64:
            self._heap = [(place, sequence) for sequence, (place, _) in self._ready.items()]
            heapq.heapify(self._heap)

    def discard(self, row: Row) -> None:
        self.terms.awaited.discard(row.sequence)
        self._ready.pop(row.sequence, None)

    def count(self, unit: int) -> int:
        return len(self._ready)

    def take(self, limit: int, *, unit: int, partial: bool) -> list[Row]:
        taken: list[Row] = []
        while self._heap and len(taken) < limit:
            place, sequence = heapq.heappop(self._heap)
            found = self._ready.get(sequence)
            if found is not None and found[0] == place:
                del self._ready[sequence]
                taken.append(found[1])
        return taken

    def shed(self, count: int) -> None:
        del self._heap[-2 * count :]
        for _ in range(min(count, len(self._ready))):
            self._ready.popitem()


class GroupQueue:
    """Samples by group: a group is taken when all of its ``group_size`` samples are ready.

    A group with a ready sample whose tags do not meet the conditions is not taken.
    """

    def __init__(self, terms: Terms, places: Places, group_size: int) -> None:
        self.terms = terms
        self.places = places
        self._size = group_size
        self._groups: dict[str, dict[int, tuple[float, Row]]] = {}
        self._group_of: dict[int, str] = {}
        self._misfits: dict[str, set[int]] = {}
        self._complete: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._group_of)

    def add(self, row: Row) -> None:
        if not self.terms.ready(row):
            return
        # Tags may have changed since the row was queued, and with them its group.
        group = row.group
        known = self._group_of.get(row.sequence)
        if known is None or known != group:
            self.discard(row)
            self._group_of[row.sequence] = group
            self._groups.setdefault(group, {})[row.sequence] = self.places.of(row), row
        elif not self.terms.where:
            return
        if self.terms.meets(row):
            self._fits(group, row)
        else:
            self._misfits.setdefault(group, set()).add(row.sequence)
        self._judge(group)

    def discard(self, row: Row) -> None:
        self.terms.awaited.discard(row.sequence)
        group = self._group_of.pop(row.sequence, None)
        if group is None:
            return
        members = self._groups[group]
        del members[row.sequence]
        if not members:
            del self._groups[group]
        self._fits(group, row)
        self._judge(group)

    def _fits(self, group: str, row: Row) -> None:
        misfits = self._misfits.get(group)
        if misfits is not None:
            misfits.discard(row.sequence)
            if not misfits:
                del self._misfits[group]

    def _judge(self, group: str) -> None:
        """A group gained or lost something: can it be taken now?"""
        if len(self._groups.get(group, ())) < self._size or group in self._misfits:
            self._complete.pop(group, None)
            return
        place = self._place(group)
        if self._complete.get(group) != place:
            self._complete[group] = place
            heapq.heappush(self._heap, (place, group))
            if len(self._heap) > 2 * len(self._complete) + 64:
                self._heap = [(place, group) for group, place in self._complete.items()]
                heapq.heapify(self._heap)

    def count(self, unit: int) -> int:
        sizes = (len(self._groups[group]) for group in self._complete)
        return sum(size for size in sizes if size <= unit)

    def take(self, limit: int, *, unit: int, partial: bool) -> list[Row]:
        taken: list[Row] = []
        passed: list[tuple[float, str]] = []
        while self._heap and len(taken) < limit:
            place, group = heapq.heappop(self._heap)
            if self._complete.get(group) != place:
                continue
            if len(self._groups[group]) > min(unit, limit - len(taken)):
                passed.append((place, group))
            else:
                taken.extend(self._remove(group))
        for entry in passed:
            heapq.heappush(self._heap, entry)
        if partial:
            rest = self._groups.keys() - self._complete.keys() - self._misfits.keys()
            for _, group in sorted((self._place(group), group) for group in rest):
                if len(taken) + len(self._groups[group]) <= limit:
                    taken.extend(self._remove(group))
        return taken

    def _remove(self, group: str) -> list[Row]:
        rows = [row for _, (_, row) in sorted(self._groups[group].items())]
        for row in rows:
            self.discard(row)
        return rows

    def _place(self, group: str) -> float:
        return min(place for place, _ in self._groups[group].values())

    def shed(self, count: int) -> None:
        del self._heap[-2 * count :]
        for held in (self._groups, self._group_of, self._misfits, self._complete):
            for _ in range(min(count, len(held))):
                held.popitem()
