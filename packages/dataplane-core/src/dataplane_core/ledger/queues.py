"""Queues of the samples that one task could claim, so that a claim costs what it takes.

A queue learns of each sample when it becomes ready and forgets it when it is claimed or cleared; it
never scans the partition, so its cost does not grow with what was consumed before.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import Protocol

from dataplane_core.ledger.order import Places
from dataplane_core.ledger.rows import Row
from dataplane_core.ledger.selection import ClaimRequest


class Queue(Protocol):
    """The ready samples of one task and one set of required fields."""

    required: frozenset[str]
    places: Places

    def __len__(self) -> int:
        """Ready samples, those of incomplete groups included."""

    def add(self, row: Row) -> None:
        """A sample became ready; adding it again changes nothing."""

    def discard(self, row: Row) -> None:
        """A sample is no longer ready, or never was."""

    def count(self, request: ClaimRequest) -> int:
        """How many samples `take` could give without ``partial``."""

    def take(self, request: ClaimRequest, limit: int, *, partial: bool) -> list[Row]:
        """Remove and return up to ``limit`` samples; ``partial`` breaks incomplete groups up."""

    def rows(self) -> Iterable[Row]:
        """The ready samples, in no order."""


class SampleQueue:
    """Samples one by one: a heap whose entries may be out of date, and the truth beside it."""

    def __init__(self, required: frozenset[str], places: Places) -> None:
        self.required = required
        self.places = places
        self._ready: dict[int, Row] = {}
        self._heap: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._ready)

    def rows(self) -> Iterable[Row]:
        return self._ready.values()

    def add(self, row: Row) -> None:
        if row.sequence in self._ready:
            return
        self._ready[row.sequence] = row
        heapq.heappush(self._heap, (self.places.of(row), row.sequence))
        if len(self._heap) > 2 * len(self._ready) + 64:
            self._heap = [(self.places.of(r), r.sequence) for r in self._ready.values()]
            heapq.heapify(self._heap)

    def discard(self, row: Row) -> None:
        self._ready.pop(row.sequence, None)

    def count(self, request: ClaimRequest) -> int:
        if not request.where:
            return len(self._ready)
        return sum(request.matches(row.tags) for row in self._ready.values())

    def take(self, request: ClaimRequest, limit: int, *, partial: bool) -> list[Row]:
        taken: list[Row] = []
        passed: list[tuple[float, int]] = []
        while self._heap and len(taken) < limit:
            entry = heapq.heappop(self._heap)
            row = self._ready.get(entry[1])
            if row is None:
                continue
            if request.matches(row.tags):
                taken.append(row)
                del self._ready[row.sequence]
            else:
                passed.append(entry)
        for entry in passed:
            heapq.heappush(self._heap, entry)
        return taken


class GroupQueue:
    """Samples by group: a group is taken when all of its ``group_size`` samples are ready."""

    def __init__(self, required: frozenset[str], places: Places, group_size: int) -> None:
        self.required = required
        self.places = places
        self._size = group_size
        self._groups: dict[str, dict[int, Row]] = {}
        self._group_of: dict[int, str] = {}
        self._complete: set[str] = set()
        self._heap: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._group_of)

    def rows(self) -> Iterable[Row]:
        return (row for group in self._groups.values() for row in group.values())

    def add(self, row: Row) -> None:
        # Tags may have changed since the row was queued, and with them its group.
        group = row.group
        known = self._group_of.get(row.sequence)
        if known == group:
            return
        if known is not None:
            self.discard(row)
        self._group_of[row.sequence] = group
        members = self._groups.setdefault(group, {})
        members[row.sequence] = row
        if len(members) >= self._size and group not in self._complete:
            self._complete.add(group)
            heapq.heappush(self._heap, (self._place(members), group))

    def discard(self, row: Row) -> None:
        group = self._group_of.pop(row.sequence, None)
        if group is None:
            return
        members = self._groups[group]
        del members[row.sequence]
        if len(members) < self._size:
            self._complete.discard(group)
        if not members:
            del self._groups[group]

    def count(self, request: ClaimRequest) -> int:
        return sum(
            len(self._groups[group])
            for group in self._complete
            if self._matches(request, self._groups[group])
        )

    def take(self, request: ClaimRequest, limit: int, *, partial: bool) -> list[Row]:
        taken: list[Row] = []
        passed: list[tuple[float, str]] = []
        while self._heap and len(taken) < limit:
            place, group = heapq.heappop(self._heap)
            if group not in self._complete:
                continue
            members = self._groups[group]
            if len(members) > limit - len(taken) or not self._matches(request, members):
                passed.append((place, group))
            else:
                taken.extend(self._remove(group))
        for entry in passed:
            heapq.heappush(self._heap, entry)
        if partial:
            rest = [group for group in self._groups if group not in self._complete]
            for group in sorted(rest, key=lambda group: self._place(self._groups[group])):
                members = self._groups[group]
                if len(taken) + len(members) <= limit and self._matches(request, members):
                    taken.extend(self._remove(group))
        return taken

    def _remove(self, group: str) -> list[Row]:
        rows = sorted(self._groups[group].values(), key=lambda row: row.sequence)
        for row in rows:
            self.discard(row)
        return rows

    def _place(self, members: dict[int, Row]) -> float:
        return min(self.places.of(row) for row in members.values())

    @staticmethod
    def _matches(request: ClaimRequest, members: dict[int, Row]) -> bool:
        return not request.where or all(request.matches(row.tags) for row in members.values())
