"""`Task`: the state of a partition's samples for one task, and its queues of ready samples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress, repeat
from operator import contains
from typing import Any, TypeAlias  # Any: cells belong to the storage

from dataplane_core.ledger.assignments import Assignment, Assignments
from dataplane_core.ledger.leases import Lease
from dataplane_core.ledger.order import ClaimOrder, Positions
from dataplane_core.ledger.queues import GroupQueue, Queue, SampleQueue, Terms
from dataplane_core.ledger.rows import NO_STATES, NamedTask, Row, Rows, State
from dataplane_core.ledger.samples import Samples
from dataplane_core.ledger.selection import ClaimRequest, TagFilter
from dataplane_core.ledger.sequence_set import CHUNK_BITS

_IDLE = 0.25
"""Fraction of the open samples that may be added to an unused queue before it counts as idle."""

_MAX_QUEUES = 32
"""Maximum queues of a task; a claim that needs another drops the least recently used one.

Most queues are dropped earlier, see `Task.enqueue`.
"""

QueueKey: TypeAlias = tuple[frozenset[str], frozenset[TagFilter], int | None]
"""Terms of claims: required fields, conditions and seed."""


OPEN, ASSIGNED, LEASED, ACKNOWLEDGED = range(4)
_CODES: dict[type, int] = {
    type(None): OPEN,
    Assignment: ASSIGNED,
    Lease: LEASED,
    str: ACKNOWLEDGED,
}


@dataclass
class Claimed:
    """Result of a claim.

    Attributes:
        rows: the claimed samples.
        token: token of the lease; None for a claim without a lease or without samples.
    """

    rows: list[Row]
    token: str | None


@dataclass(eq=False)
class Task(NamedTask):
    """The state of each sample for one task: open, assigned, leased or acknowledged.

    The sample's row holds the state, so that a task needs no memory until it claims.

    Args:
        name: name of the task.
        retired: list to which dropped queues are added, to be freed step by step.
        order: order of claims without a seed; None means the order of first puts.
        group_size: samples per group, or None.

    Attributes:
        totals: number of samples by state: open, assigned, leased and acknowledged.
        queues: queues of open and ready samples by the terms of claims, most recently used last.
        counted: revision, fields and result of the last count of ready samples.
        assignments: samples assigned to data-parallel ranks.
    """

    name: str
    retired: list[Queue]
    order: ClaimOrder | None
    group_size: int | None
    totals: list[int] = field(default_factory=lambda: [0, 0, 0, 0])
    queues: dict[QueueKey, Queue] = field(default_factory=dict)
    counted: tuple[int, frozenset[str], int] = (0, frozenset(), 0)
    assignments: Assignments = field(default_factory=Assignments)
    _claimed_rows: dict[int, int] = field(default_factory=dict)
    """Chunk number to the number of its rows that are leased or acknowledged."""
    _first_chunk: int = 0
    """Lower bound of the first chunk with an open or assigned row."""

    @property
    def open(self) -> int:
        """Number of samples that can be claimed, once they have the fields."""
        return self.totals[OPEN]

    @property
    def assigned(self) -> int:
        """Number of samples assigned to data-parallel ranks."""
        return self.totals[ASSIGNED]

    @property
    def leased(self) -> int:
        """Number of samples claimed under a lease."""
        return self.totals[LEASED]

    @property
    def acknowledged(self) -> int:
        """Number of samples acknowledged, or claimed without a lease."""
        return self.totals[ACKNOWLEDGED]

    def code(self, row: Row) -> int:
        """Return `OPEN`, `ASSIGNED`, `LEASED` or `ACKNOWLEDGED`."""
        return _CODES[type(row.states.get(self))]

    def lease_of(self, row: Row) -> Lease | None:
        """Return the lease under which the sample is claimed; None if it is not leased."""
        state = row.states.get(self)
        return state if isinstance(state, Lease) else None

    def add_open(self, count: int) -> None:
        """Count new samples as open."""
        self.totals[OPEN] += count

    def move(self, rows: Iterable[Row], to: State | None) -> None:
        """Set the state of samples (None: open); queues and assignments stay as they are."""
        after = _CODES[type(to)]
        moved = 0
        claimed: dict[int, int] = {}
        # Samples of one claim share a mapping of states, so each mapping is replaced once. Keyed by
        # the id() of the old mapping; the value keeps it alive, so that no new one gets its id().
        replacements: dict[int, tuple[Mapping[NamedTask, State], Mapping[NamedTask, State]]] = {}
        for row in rows:
            states = row.states
            before = _CODES[type(states.get(self))]
            pair = replacements.get(id(states))
            if pair is None:
                new: dict[NamedTask, State] = {
                    task: state for task, state in states.items() if task is not self
                }
                if to is not None:
                    new[self] = to
                pair = replacements[id(states)] = states, new or NO_STATES
            row.states = pair[1]
            self.totals[before] -= 1
            moved += 1
            if (before > ASSIGNED) is not (after > ASSIGNED):
                chunk = row.sequence >> CHUNK_BITS
                claimed[chunk] = claimed.get(chunk, 0) + 1
        self.totals[after] += moved
        for chunk, count in claimed.items():
            self._count_claimed(chunk, count if after > ASSIGNED else -count)

    def remove(self, rows: Sequence[Row]) -> list[State | None]:
        """Stop counting cleared samples; return their states. The caller resets ``row.states``."""
        states = [row.states.get(self) for row in rows]
        removed: dict[int, int] = {}
        for row, state in zip(rows, states, strict=True):
            before = _CODES[type(state)]
            self.totals[before] -= 1
            if before > ASSIGNED:
                chunk = row.sequence >> CHUNK_BITS
                removed[chunk] = removed.get(chunk, 0) + 1
        for chunk, count in removed.items():
            self._count_claimed(chunk, -count)
        if self.assignments.missed:
            self.assignments.missed.difference_update(row.sample_id for row in rows)
        return states

    def _count_claimed(self, chunk: int, step: int) -> None:
        count = self._claimed_rows.get(chunk, 0) + step
        if count:
            self._claimed_rows[chunk] = count
        else:
            del self._claimed_rows[chunk]
        if step < 0 and chunk < self._first_chunk:
            self._first_chunk = chunk

    def get_or_create_queue(self, request: ClaimRequest, rows: Rows) -> Queue:
        """Return the queue for a claim, and mark it as most recently used.

        A new queue is empty: `extend` fills it with ``rows``.
        """
        key = frozenset(request.required_fields), frozenset(request.where), request.seed
        queue = self.queues.pop(key, None)
        if queue is None:
            terms = Terms(key[0], request.where)
            positions = Positions(request.seed, self.order)
            size = self.group_size
            queue = (
                SampleQueue(terms, positions)
                if size is None
                else GroupQueue(terms, positions, size)
            )
            terms.unseen = rows.in_chunks()
            if len(self.queues) >= _MAX_QUEUES:
                self.retired.append(self.queues.pop(next(iter(self.queues))))
        self.queues[key] = queue
        queue.terms.added = 0
        return queue

    def extend(self, queue: Queue) -> bool:
        """Add the next chunk of rows that a queue has not seen; return whether it is complete.

        Puts and claims change an incomplete queue like any other. So a row may be added twice; the
        second time has no effect.
        """
        if queue.terms.unseen is not None:
            chunk = next(queue.terms.unseen, None)
            if chunk is None:
                queue.terms.unseen, queue.terms.added = None, 0
            else:
                queue.add([row for row in chunk if self not in row.states])
        return queue.terms.unseen is None

    def queue(self, request: ClaimRequest, rows: Rows) -> Queue:
        """Return the queue for a claim, complete."""
        queue = self.get_or_create_queue(request, rows)
        while not self.extend(queue):
            pass
        return queue

    def regroup(self, group_size: int | None) -> None:
        """Set the group size; if it changes, drop the queues."""
        if group_size != self.group_size:
            self.group_size = group_size
            self.drop_queues()

    def drop_queues(self) -> None:
        """Drop all queues; the next claims rebuild them."""
        self.retired += self.queues.values()
        self.queues.clear()

    def enqueue(self, rows: Sequence[Row]) -> None:
        """Drop idle queues, then add open rows, new or changed, to the remaining queues.

        A filter that changes with every step, for example on the weight version, leaves an unused
        queue behind each time. To rebuild a queue, the open samples are scanned once. To keep it,
        every new sample is added to it. So a queue counts as idle once the samples added since its
        last claim exceed a fraction (`_IDLE`) of the open ones. The most recently used queue stays.
        """
        for key, queue in list(self.queues.items())[:-1]:
            if queue.terms.unseen is None and queue.terms.added > self.open * _IDLE:
                self.retired.append(self.queues.pop(key))
        for queue in self.queues.values():
            queue.add(rows)

    def dequeue(self, rows: Sequence[Row], taken_from: Queue | None = None) -> None:
        """Remove rows that are no longer open from all queues except ``taken_from``."""
        for queue in self.queues.values():
            if queue is not taken_from:
                queue.discard(rows)

    def retire(self) -> None:
        """Free the state of a task that is no longer declared; rows may still refer to it."""
        self.drop_queues()
        self.assignments.missed.clear()
        self._claimed_rows.clear()

    def open_rows(self, rows: Rows) -> Iterator[Row]:
        """Yield the open samples."""
        for number, chunk in rows.chunks.items():
            if self._claimed_rows.get(number, 0) < len(chunk):
                yield from (row for row in chunk.values() if self not in row.states)

    def oldest_unclaimed(self, rows: Rows) -> Row | None:
        """Return the oldest open or assigned row; None if there is none."""
        if not (self.open or self.assigned):
            return None
        for number, chunk in rows.chunks.items():
            if number >= self._first_chunk and self._claimed_rows.get(number, 0) < len(chunk):
                self._first_chunk = number
                return next(row for row in chunk.values() if self.code(row) <= ASSIGNED)
        return None

    def count_ready(self, required: frozenset[str], samples: Samples, revision: int) -> int:
        """Return how many open samples have the fields; ``revision`` is the partition's."""
        for (fields, where, _), queue in self.queues.items():
            if fields == required and not where and queue.terms.unseen is None:
                return len(queue)
        if self.counted[:2] == (revision, required):
            return self.counted[2]
        # Filter column by column with C-implemented builtins, the rarest field first; skip fields
        # that every sample has.
        counts = {name: samples.field_counts.get(name, 0) for name in required}
        if 0 in counts.values():
            return 0
        cells: list[Mapping[str, Any]] = [row.cells for row in self.open_rows(samples.rows)]
        for name in sorted(required, key=lambda name: counts[name]):
            if counts[name] < len(samples.rows):
                cells = list(compress(cells, map(contains, cells, repeat(name))))
        self.counted = revision, required, len(cells)
        return len(cells)
