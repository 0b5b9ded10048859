"""`Partition`: the samples of one partition, and each task's claims of them."""

from __future__ import annotations

import itertools
import math
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any  # Any: cells belong to the storage, tags to the caller

from dataplane_core.capabilities import TaskCounts
from dataplane_core.declaration import PartitionDeclaration, describe_large_group
from dataplane_core.errors import InvalidRequestError, UnknownTaskError, listed
from dataplane_core.ledger.assignments import Assignment, indivisible_units, split
from dataplane_core.ledger.leases import Lease, Leases
from dataplane_core.ledger.order import ClaimOrder
from dataplane_core.ledger.queues import Queue
from dataplane_core.ledger.rows import NO_STATES, Row
from dataplane_core.ledger.samples import Samples
from dataplane_core.ledger.selection import ClaimRequest, Ranks, balance
from dataplane_core.ledger.sequence_set import CHUNK_BITS
from dataplane_core.ledger.sizes import Measure
from dataplane_core.ledger.tasks import ACKNOWLEDGED, Claimed, Task

_FREED_AT_ONCE = 256
"""Number of entries that each change frees in retired queues."""
_MAX_SEEN_AT_ONCE = 15_000
"""Maximum samples that a count scans; to count more, a queue is built, which knows its length."""


class Partition:
    """The state of one partition: its samples, its tasks, and its leases.

    `Ledger` owns it; nothing here locks or waits.

    Attributes:
        samples: the stored samples; ``rows`` are their rows.
        tasks: tasks by name, with the states of the samples and queues of ready ones.
        leases: claims that are not acknowledged yet.
        pending_kinds, reserved: fields and samples of running puts.
        revision: grows with every change.
    """

    def __init__(
        self,
        declaration: PartitionDeclaration,
        order: ClaimOrder | None,
        totals: Counter[str],
        measure: Measure | None,
        revisions: Iterator[int],
        fence: Iterator[int],
    ) -> None:
        self.declaration = declaration
        self.totals = totals
        self._order = order
        self._revisions = revisions
        self._fence = fence
        self.samples = Samples(declaration.partition_id, measure)
        self.rows = self.samples.rows
        self.pending_kinds: dict[str, list[str]] = {}
        self.reserved: dict[str, int] = {}
        self._retired: list[Queue] = []
        self.tasks = {name: self._new_task(name) for name in declaration.consumer_tasks}
        self.leases = Leases(declaration.partition_id)
        # No lease or assignment expires before this time. Deadlines only move later, so this stays
        # true when a lease is renewed or ends.
        self._next_expiry = math.inf
        self.put_total = 0
        self.touch()

    def _new_task(self, name: str) -> Task:
        return Task(name, self._retired, self._order, self.declaration.grpo_group_size)

    def touch(self) -> None:
        """Increase ``revision``, and free a part of the retired queues."""
        self.revision = next(self._revisions)
        if self._retired and self._retired[-1].free_entries(_FREED_AT_ONCE):
            self._retired.pop()

    @property
    def held(self) -> int:
        """Number of samples that count against the capacity: present and reserved ones."""
        return len(self.rows) + len(self.reserved)

    @property
    def _is_grouped(self) -> bool:
        return self.declaration.grpo_group_size is not None

    @property
    def not_put(self) -> int:
        """Number of declared samples that are still to be put."""
        return max(0, self.declaration.num_samples - self.put_total)

    def redeclare(self, declaration: PartitionDeclaration) -> None:
        """Replace the declaration; retain the rows, and the states of tasks declared again.

        Samples assigned to ranks become claimable by all.
        """
        for task in self.tasks.values():
            self.reopen_assignments(task, task.assignments)
        self.declaration = declaration
        previous = self.tasks
        tasks = declaration.consumer_tasks
        self.tasks = {name: previous.get(name) or self._new_task(name) for name in tasks}
        for name, task in self.tasks.items():
            if name not in previous:
                task.add_open(len(self.rows))
        for name, task in previous.items():
            if name not in self.tasks:
                task.retire()
            else:
                task.regroup(declaration.grpo_group_size)
        for lease in [each for each in self.leases.values() if each.task.name not in self.tasks]:
            del self.leases[lease.token]
            lease.rows.clear()
        self.put_total = len(self.rows)
        self.samples.forget_fields_if_empty()
        self.touch()

    def task(self, task_name: str) -> Task:
        """Return the task; if unknown, raise an error that names the registered ones."""
        task = self.tasks.get(task_name)
        if task is None:
            raise UnknownTaskError(
                f"partition {self.declaration.partition_id!r} has no task {task_name!r}; "
                f"registered tasks: {listed(self.tasks) or 'none'}"
            )
        return task

    def accept(
        self,
        written: Sequence[Row],
        present: Sequence[Row],
        tags: Sequence[Mapping[str, Any]] | None,
    ) -> None:
        """Tag the rows that a put wrote, and make them visible to claims.

        Args:
            written: the rows that the put wrote.
            present: the written rows that existed before the put.
            tags: one mapping per written row that replaces its tags; None keeps them.
        """
        old_tags = {row: row.tags for row in present} if self._order is not None else {}
        for row, new_tags in zip(written, tags, strict=True) if tags is not None else ():
            row.tags = dict(new_tags)
        moved = [row for row, before in old_tags.items() if row.tags != before]
        new = len(written) - len(present)
        self.put_total += new
        for task in self.tasks.values():
            # The configured order may depend on tags: rebuild the queues.
            if any(task not in row.states for row in moved):
                task.drop_queues()
            task.add_open(new)
            if task.queues:
                task.enqueue([row for row in written if task not in row.states])
        self.touch()

    def prepare(self, request: ClaimRequest) -> bool:
        """Do a bounded part of the work that a claim with new terms needs; return True when done.

        Terms are fields, filter and seed; the first claim with given terms has to see every open
        sample. A server that must not block calls this until it returns True, and then `claim` with
        no other call in between.
        """
        task = self.task(request.task_name)
        if request.sample_ids is not None:
            return True
        return task.extend(task.get_or_create_queue(request, self.rows))

    def claim(self, request: ClaimRequest, now: float) -> Claimed | None:
        """Claim samples; return None if a blocking claim has to wait.

        All claims go through this method.

        Raises:
            UnknownTaskError: the task is not registered.
            InvalidRequestError: (a ValueError) the batch size is not a multiple of the group size,
                every remaining group has more samples than the batch size, or the task has
                acknowledged a named sample.
        """
        task = self.task(request.task_name)
        if request.sample_ids is not None:
            named = self._take_named(task, request, request.sample_ids)
            return None if named is None else self._claimed(task, request, named, now)
        size = self.declaration.grpo_group_size
        if size is not None and request.batch_size % size:
            raise InvalidRequestError(
                f"claim_meta(partition={self.declaration.partition_id!r}): batch_size "
                f"{request.batch_size} is not a multiple of grpo_group_size {size}; a claim takes "
                "complete groups"
            )
        ranks = request.ranks
        if ranks is None:
            rows = self._draw(task, request, request.batch_size)
        else:
            rows = self._draw_for_rank(task, request, ranks, now)
        if rows is None or (not rows and self._is_blocked_on_leased(task, request)):
            return None
        if not rows:
            self._refuse_large_group(task, request)
        return self._claimed(task, request, rows, now)

    def _take_named(
        self, task: Task, request: ClaimRequest, sample_ids: Sequence[str]
    ) -> list[Row] | None:
        """Take the named rows that are ready; return None if the claim must wait for the rest."""
        present = [row for each in sample_ids if (row := self.rows.get(each)) is not None]
        done = [row.sample_id for row in present if task.code(row) == ACKNOWLEDGED]
        if done:
            raise InvalidRequestError(
                f"claim_meta(partition={self.declaration.partition_id!r}, task={task.name!r}): "
                f"the task has acknowledged {len(done)} of the {len(sample_ids)} named samples: "
                f"{listed(done)}"
            )
        required = frozenset(request.required_fields)
        ready = [row for row in present if task not in row.states and required <= row.cells.keys()]
        if request.blocking and len(ready) < len(sample_ids):
            return None
        if ready:
            task.dequeue(ready)
            self.touch()
        return ready

    def _draw(self, task: Task, request: ClaimRequest, limit: int) -> list[Row] | None:
        """Take up to ``limit`` rows from the queue; return None if the claim has to wait."""
        queue = task.queue(request, self.rows)
        queue.positions.check()
        last = self._nothing_more(task, queue)
        # A draw for ranks takes several batches, but each group must fit into one rank's batch.
        unit = request.batch_size
        # If nothing is ready, reopen the samples that were assigned to other `Ranks` without a
        # deadline.
        if task.assigned and (last or not request.blocking) and not queue.count(unit):
            self.reopen_assignments(task, task.assignments.untimed(request.ranks))
            last = self._nothing_more(task, queue)
        if request.blocking and not last and queue.count(unit) < limit:
            return None
        rows = [self.rows.at(each) for each in queue.take(limit, unit=unit, partial=last)]
        if rows:
            task.dequeue(rows, taken_from=queue)
            self.touch()
        return rows

    def _nothing_more(self, task: Task, queue: Queue) -> bool:
        """Return whether all declared samples were put, and all open ones that match are ready."""
        if self.not_put:
            return False
        if queue.terms.where:
            return not queue.terms.awaited
        return len(queue) == task.open

    def large_group(self, request: ClaimRequest) -> tuple[str, int] | None:
        """Return the name and size of the largest complete group that exceeds the batch size."""
        if self.declaration.grpo_group_size is None or request.sample_ids is not None:
            return None
        queue = self.task(request.task_name).get_or_create_queue(request, self.rows)
        return queue.oversized_group(request.batch_size)

    def _refuse_large_group(self, task: Task, request: ClaimRequest) -> None:
        """Raise if every remaining sample is in a group larger than the batch size."""
        large = self.large_group(request)
        if large is not None and self._nothing_more(task, task.queue(request, self.rows)):
            raise InvalidRequestError(
                f"claim_meta(partition={self.declaration.partition_id!r}, "
                f"task={task.name!r}): {describe_large_group(large, request.batch_size)}"
            )

    def _is_blocked_on_leased(self, task: Task, request: ClaimRequest) -> bool:
        """Return whether a claim that got nothing waits for samples that may become open again.

        Those are leased samples, and samples assigned to another rank with a deadline.
        """
        if not (request.blocking and request.wait_for_leased):
            return False
        if not request.where:
            return bool(task.leased or task.assignments.timed)
        held = [each.rows for each in self.leases.of(task)]
        held += (each.rows for each in task.assignments.timed)
        return any(request.matches(row.tags) for rows in held for row in rows.values())

    def _draw_for_rank(
        self, task: Task, request: ClaimRequest, ranks: Ranks, now: float
    ) -> list[Row] | None:
        rank = request.dp_rank or 0
        assigned = self._take_assigned(task, request, ranks, rank, now)
        if assigned:
            return assigned
        drawn = self._draw(task, request, ranks.world * request.batch_size)
        if not drawn:
            return drawn
        units = indivisible_units(drawn, self._is_grouped)
        parts = balance([sum(row.length for row in unit) for unit in units], ranks.world)
        if not parts[rank] and not task.assignments.missed.isdisjoint(
            row.sample_id for row in drawn
        ):
            # With fewer units than ranks every draw serves the same ranks, and the caller is not
            # among them. An assignment of these samples has expired, so one of those ranks may be
            # dead. If the caller did not take the first part, no rank would process the samples.
            first = next(other for other, part in enumerate(parts) if part)
            parts[rank], parts[first] = parts[first], []
        batches = [[row for index in part for row in units[index]] for part in parts]
        claimed, batches[rank] = split(batches[rank], request.batch_size, self._is_grouped)
        seconds = math.inf if request.lease_s is None else request.lease_s
        for other, batch in enumerate(batches):
            if batch:
                rows = {row.sample_id: row for row in batch}
                assignment = Assignment(ranks, other, rows, now + seconds, seconds)
                task.move(batch, assignment)
                task.assignments.add(assignment)
                self._next_expiry = min(self._next_expiry, assignment.deadline)
        return claimed

    def _take_assigned(
        self, task: Task, request: ClaimRequest, ranks: Ranks, rank: int, now: float
    ) -> list[Row]:
        """Take up to a batch from the rank's oldest assignment."""
        task.assignments.extend(ranks, rank, now)
        while (assignment := task.assignments.first(ranks, rank)) is not None:
            rows, _ = split(list(assignment.rows.values()), request.batch_size, self._is_grouped)
            if rows:
                return task.assignments.take(assignment, [row.sample_id for row in rows])
            # Every group is too large for this rank's batch size: open them to other ranks.
            self.reopen_assignments(task, [assignment])
        return []

    def _claimed(self, task: Task, request: ClaimRequest, rows: list[Row], now: float) -> Claimed:
        """Record a claim of rows that were taken from the queues."""
        if rows:
            self.totals["claims"] += 1
            self.totals["samples_claimed"] += len(rows)
            self.touch()
        if request.lease_s is None or not rows:
            task.move(rows, "")
            return Claimed(rows, None)
        # A fencing number: a later lease of the same samples has a larger one.
        number = next(self._fence)
        token = f"{number}.{secrets.token_hex(8)}"
        lease = self.leases[token] = Lease(
            token=token,
            name=f"{number}-{secrets.token_hex(4)}",
            task=task,
            owner=request.owner,
            claimed=frozenset(row.sample_id for row in rows),
            rows={row.sample_id: row for row in rows},
            since=now,
            deadline=now + request.lease_s,
            seconds=request.lease_s,
            rank=request.dp_rank,
            ranks=request.ranks,
        )
        self._next_expiry = min(self._next_expiry, lease.deadline)
        task.move(rows, lease)
        return Claimed(rows, token)

    def acknowledge(self, token: str, sample_ids: Sequence[str], task: str | None = None) -> str:
        """Acknowledge samples of a lease; its other samples stay leased. Return the task's name.

        Raises:
            InvalidRequestError, LeaseLostError: as `Leases.holding`.
        """
        lease = self.leases.holding(token, sample_ids, task)
        rows = self.leases.take(lease, sample_ids)
        self.task(lease.task.name).move(rows, lease.token)
        self.totals["samples_acknowledged"] += len(rows)
        self.touch()
        return lease.task.name

    def release(self, token: str, sample_ids: Sequence[str], task: str | None = None) -> None:
        """Make samples of a lease claimable again; its other samples stay leased.

        Raises:
            InvalidRequestError, LeaseLostError: as `Leases.holding`.
        """
        lease = self.leases.holding(token, sample_ids, task)
        rows = self.leases.take(lease, sample_ids)
        self.reopen(self.task(lease.task.name), rows)
        self.totals["samples_released"] += len(rows)

    def renew(
        self, token: str, sample_ids: Sequence[str], now: float, task: str | None = None
    ) -> None:
        """Restart the period of a lease, and of the assignments of its rank.

        Raises:
            InvalidRequestError, LeaseLostError: as `Leases.holding`.
        """
        lease = self.leases.holding(token, sample_ids, task)
        lease.deadline = now + lease.seconds
        if lease.ranks is not None and lease.rank is not None:
            self.task(lease.task.name).assignments.extend(lease.ranks, lease.rank, now)
        self.touch()

    def reopen(self, task: Task, rows: list[Row]) -> None:
        """Make rows that a task had claimed claimable again."""
        task.move(rows, None)
        task.enqueue(rows)
        self.touch()

    def reopen_assignments(self, task: Task, assignments: Iterable[Assignment]) -> None:
        """Make samples assigned to ranks claimable by all."""
        for each in list(assignments):
            self.reopen(task, task.assignments.take(each, list(each.rows)))

    def end_lease(self, lease: Lease) -> int:
        """End a lease that was not acknowledged; return how many samples it still held."""
        rows = self.leases.take(lease, list(lease.rows))
        self.totals["leases_expired"] += 1
        self.totals["samples_expired"] += len(rows)
        self.reopen(self.task(lease.task.name), rows)
        return len(rows)

    def expire(self, now: float) -> bool:
        """End expired leases and assignments; return whether there were any."""
        if now < self._next_expiry:
            return False
        leases = [lease for lease in self.leases.values() if lease.deadline <= now]
        any_assigned = False
        for task in self.tasks.values():
            expired = [each for each in task.assignments.timed if each.deadline <= now]
            for assignment in expired:
                task.assignments.missed.update(assignment.rows)
            self.reopen_assignments(task, expired)
            any_assigned = any_assigned or bool(expired)
        for lease in leases:
            self.end_lease(lease)
        timed = (each.deadline for task in self.tasks.values() for each in task.assignments.timed)
        leased = (lease.deadline for lease in self.leases.values())
        self._next_expiry = min(itertools.chain(timed, leased), default=math.inf)
        return bool(leases) or any_assigned

    def next_expiry(self) -> float | None:
        """Return when to call `expire` next, on the caller's clock; None if never.

        Nothing expires earlier. If leases were renewed or ended, that call may find nothing to
        expire; it then updates the time.
        """
        return None if self._next_expiry == math.inf else self._next_expiry

    def drop(self, sample_ids: Iterable[str]) -> list[Row]:
        """Remove samples from the partition, ignoring unknown ids; return their rows."""
        known = (self.rows.get(sample_id) for sample_id in dict.fromkeys(sample_ids))
        dropped = [row for row in known if row is not None]
        self.samples.remove(dropped)
        for task in self.tasks.values():
            unclaimed = []
            for row, state in zip(dropped, task.remove(dropped), strict=True):
                if state is None:
                    unclaimed.append(row)
                elif isinstance(state, Lease):
                    self.leases.take(state, [row.sample_id])
                elif isinstance(state, Assignment):
                    task.assignments.take(state, [row.sample_id])
            task.dequeue(unclaimed)
        for row in dropped:
            row.states = NO_STATES
        self.touch()
        return dropped

    def dismantle(self, count: int) -> list[Row]:
        """Remove up to ``count`` samples of a partition that is no longer registered."""
        rows: list[Row] = []
        while self.rows and len(rows) < count:
            chunk = next(reversed(self.rows.chunks.values()))
            for row in list(chunk.values())[: count - len(rows)]:
                self.rows.remove(row)
                row.dropped = True
                rows.append(row)
                for state in row.states.values():
                    if not isinstance(state, str):
                        state.rows.pop(row.sample_id, None)
                row.states = NO_STATES
        for task in self.tasks.values():
            task.drop_queues()
        self._retired[:] = [queue for queue in self._retired if not queue.free_entries(2 * count)]
        return rows

    def all_acknowledged(self, task_names: Iterable[str]) -> bool:
        """Return whether the partition has samples and each task has acknowledged all of them."""
        return bool(self.rows) and all(
            name in self.tasks and self.tasks[name].acknowledged == len(self.rows)
            for name in task_names
        )

    def counts(self, task_name: str, required_fields: Sequence[str]) -> TaskCounts:
        """Return the number of samples in each state for a task."""
        task = self.task(task_name)
        ready = task.count_ready(frozenset(required_fields), self.samples, self.revision)
        return TaskCounts(
            put=self.put_total,
            ready=ready,
            not_ready=task.open - ready,
            leased=task.leased + task.assigned,
            acknowledged=task.acknowledged,
            cleared=self.put_total - len(self.rows),
        )

    def prepare_counts(self, task_name: str, required_fields: Sequence[str]) -> bool:
        """Do a bounded part of the work for `counts`; return True when done, as `prepare`."""
        task, required = self.task(task_name), frozenset(required_fields)
        is_counted = task.counted[:2] == (self.revision, required)
        # A count visits every row of each chunk that has an open one.
        few = min(len(self.rows), task.open << CHUNK_BITS) <= _MAX_SEEN_AT_ONCE
        return is_counted or few or self.prepare(ClaimRequest(task_name, tuple(required_fields), 1))
