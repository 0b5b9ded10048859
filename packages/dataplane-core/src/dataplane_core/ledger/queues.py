"""Queues of the samples that one task can claim, so that a claim's cost grows with its batch only.

An open sample enters a queue when it is put or gains a field, and leaves it when it is claimed or
cleared. A queue scans the partition only when it is built, so the cost of later claims does not
grow with the samples consumed before. Conditions on tags are evaluated when a sample enters, not at
every claim.

Queues hold sequence numbers, not rows. So a dropped queue that is not freed yet keeps no sample
alive.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from dataplane_core.ledger.order import Positions
from dataplane_core.ledger.ordered_keys import OrderedKeys
from dataplane_core.ledger.parted_dict import PartedDict
from dataplane_core.ledger.rows import Row
from dataplane_core.ledger.selection import TagFilter
from dataplane_core.ledger.sequence_set import SequenceSet


class Terms:
    """Conditions under which a sample enters a queue, and the samples that may still meet them.

    Args:
        required: fields that a sample must have.
        where: conditions that its tags must all meet.

    Attributes:
        awaited: sequences of open samples that meet ``where`` but lack a field; recorded only if
            there are conditions.
        added: number of samples added since the last claim from the queue.
        unseen: iterator over the partition's rows that the queue has not seen yet; None once the
            queue is complete.
    """

    def __init__(self, required: frozenset[str], where: Iterable[TagFilter] = ()) -> None:
        self.required = required
        self.where = tuple(where)
        self.awaited = SequenceSet()
        self.added = 0
        self.unseen: Iterator[list[Row]] | None = None

    def meets(self, row: Row) -> bool:
        """Return whether the sample's tags meet the conditions."""
        return all(condition.matches(row.tags) for condition in self.where)

    def ready(self, rows: Sequence[Row]) -> list[Row]:
        """Return the samples that have the fields; record the others in `awaited` if they match."""
        self.added += len(rows)
        required = self.required
        ready = [row for row in rows if required <= row.cells.keys()]
        if self.where:
            self.awaited.discard(row.sequence for row in rows)
            if len(ready) < len(rows):
                lacking = (row for row in rows if not required <= row.cells.keys())
                self.awaited.add(row.sequence for row in lacking if self.meets(row))
        return ready


class SampleQueue:
    """Queue of one task's ready samples, for claims with the same terms."""

    def __init__(self, terms: Terms, positions: Positions) -> None:
        self.terms = terms
        self.positions = positions
        self._ready: SequenceSet | OrderedKeys[int] = (
            SequenceSet() if positions.by_sequence else OrderedKeys()
        )

    def __len__(self) -> int:
        return len(self._ready)

    def add(self, rows: Sequence[Row]) -> None:
        """Add open samples that were put or changed; idempotent."""
        ready = self.terms.ready(rows)
        if self.terms.where:
            before = {row.sequence for row in ready}
            ready = [row for row in ready if self.terms.meets(row)]
            unmet = before.difference(row.sequence for row in ready)
            self._ready.discard(unmet)
            self.positions.forget(unmet)
        if isinstance(self._ready, SequenceSet):
            self._ready.add(row.sequence for row in ready)
        else:
            for row in ready:
                if row.sequence not in self._ready:
                    self._ready.put(row.sequence, self.positions.of(row))

    def discard(self, rows: Sequence[Row]) -> None:
        """Remove samples that are no longer open; ignore those not in the queue."""
        sequences = [row.sequence for row in rows]
        self.terms.awaited.discard(sequences)
        self._ready.discard(sequences)
        self.positions.forget(sequences)

    def count(self, unit: int) -> int:
        """Return how many samples `take` can return without ``partial``."""
        return len(self._ready)

    def oversized_group(self, unit: int) -> tuple[str, int] | None:
        """Return name and size of the largest complete group above ``unit`` samples, or None."""
        return None

    def take(self, limit: int, *, unit: int, partial: bool) -> list[int]:
        """Remove and return the sequences of up to ``limit`` samples.

        Groups of more than ``unit`` samples are left; ``partial`` takes incomplete groups too.
        """
        return self._ready.take(limit)

    def free_entries(self, count: int) -> bool:
        """Free about ``count`` entries of an unused queue; return whether it is empty."""
        return self._ready.free_entries(count) and self.terms.awaited.free_entries(count)


@dataclass(eq=False)
class _Group:
    """The ready samples of one group.

    Attributes:
        name: name of the group.
        positions: sequence of each sample to its position.
        mismatched: sequences of samples whose tags do not meet the conditions.
        member_of: the list that contains the group; None if it has mismatched or no samples.
        size: number of its samples when it was listed.
    """

    name: str
    positions: dict[int, float] = field(default_factory=dict)
    mismatched: set[int] = field(default_factory=set)
    member_of: _GroupList | None = None
    size: int = 0


class _GroupList:
    """List of groups that can be taken.

    Attributes:
        names: names of the groups, ordered by position and sequence of their first sample.
        sizes: number of samples to the number of groups of that size.
    """

    def __init__(self) -> None:
        self.names: OrderedKeys[str] = OrderedKeys()
        self.sizes: Counter[int] = Counter()

    def add(self, group: _Group) -> None:
        """Add a group that is in no list."""
        positions = group.positions
        self.names.put(group.name, min(zip(positions.values(), positions, strict=True)))
        group.member_of, group.size = self, len(group.positions)
        self.sizes[group.size] += 1

    def remove(self, group: _Group) -> None:
        """Remove a group from the list."""
        self.names.discard([group.name])
        group.member_of = None
        self.sizes[group.size] -= 1
        if not self.sizes[group.size]:
            del self.sizes[group.size]


class GroupQueue:
    """Queue of samples by group: a group is taken when all its ``group_size`` samples are ready.

    A group is not taken while a ready sample of it has tags that do not meet the conditions. The
    methods are those of `SampleQueue`.
    """

    def __init__(self, terms: Terms, positions: Positions, group_size: int) -> None:
        self.terms = terms
        self.positions = positions
        self._size = group_size
        self._group_of: PartedDict[int, _Group] = PartedDict()
        self._groups: PartedDict[str, _Group] = PartedDict()
        self._complete = _GroupList()
        self._incomplete = _GroupList()

    def __len__(self) -> int:
        """Return the number of samples, including those of incomplete or mismatched groups."""
        return len(self._group_of)

    def add(self, rows: Sequence[Row]) -> None:
        changed: dict[_Group, None] = {}
        for row in self.terms.ready(rows):
            # Tags may have changed since the row was queued, and with them its group.
            name = row.group
            group = self._group_of.get(row.sequence)
            if group is None or group.name != name:
                self._remove(row, changed)
                group = self._groups.get(name)
                if group is None:
                    group = self._groups[name] = _Group(name)
                self._group_of[row.sequence] = group
                group.positions[row.sequence] = self.positions.of(row)
            elif not self.terms.where:
                continue
            if self.terms.meets(row):
                group.mismatched.discard(row.sequence)
            else:
                group.mismatched.add(row.sequence)
            changed[group] = None
        self._update_lists(changed)

    def discard(self, rows: Sequence[Row]) -> None:
        self.terms.awaited.discard(row.sequence for row in rows)
        changed: dict[_Group, None] = {}
        for row in rows:
            self._remove(row, changed)
        self._update_lists(changed)

    def _remove(self, row: Row, changed: dict[_Group, None]) -> None:
        group = self._group_of.pop(row.sequence)
        if group is not None:
            del group.positions[row.sequence]
            self.positions.forget([row.sequence])
            group.mismatched.discard(row.sequence)
            changed[group] = None

    def _update_lists(self, changed: Iterable[_Group]) -> None:
        """Move changed groups to the list to which they belong now, if any."""
        for group in changed:
            if group.member_of is not None:
                group.member_of.remove(group)
            if not group.positions:
                del self._groups[group.name]
            elif not group.mismatched:
                is_complete = len(group.positions) >= self._size
                (self._complete if is_complete else self._incomplete).add(group)

    def count(self, unit: int) -> int:
        sizes = self._complete.sizes
        return sum(size * count for size, count in sizes.items() if size <= unit)

    def oversized_group(self, unit: int) -> tuple[str, int] | None:
        size = max(self._complete.sizes, default=0)
        if size <= unit:
            return None
        complete = (each for each in self._groups.values() if each.member_of is self._complete)
        return max(group.name for group in complete if group.size == size), size

    def take(self, limit: int, *, unit: int, partial: bool) -> list[int]:
        taken: list[int] = []
        for groups in (self._complete, self._incomplete) if partial else (self._complete,):
            skipped: list[_Group] = []  # too large for the rest of the batch; listed again below
            free = min(unit, limit - len(taken))
            while groups.sizes and free >= min(groups.sizes):
                [name] = groups.names.take(1)
                group = self._groups[name]
                groups.remove(group)
                if group.size > free:
                    skipped.append(group)
                    continue
                for sequence in group.positions:
                    del self._group_of[sequence]
                del self._groups[name]
                taken += sorted(group.positions)
                free = min(unit, limit - len(taken))
            for group in skipped:
                groups.add(group)
        return taken

    def free_entries(self, count: int) -> bool:
        names = self._complete.names, self._incomplete.names
        parts = (self._group_of, self._groups, *names, self.terms.awaited)
        return all(part.free_entries(count) for part in parts)


Queue: TypeAlias = SampleQueue | GroupQueue
