"""`PartitionBook`: one partition's samples, and what each task did with them."""

from __future__ import annotations

import itertools
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import compress, repeat
from operator import attrgetter, contains
from typing import Any  # Any: cells belong to the storage, tags to the caller

from dataplane_core.client import TaskCounts
from dataplane_core.declaration import PartitionDeclaration, missing_data
from dataplane_core.errors import (
    ClaimTimeoutError,
    InvalidRequestError,
    UnknownTaskError,
    listed,
)
from dataplane_core.ledger.order import ClaimOrder, Places
from dataplane_core.ledger.origins import count_origins, note_origin
from dataplane_core.ledger.queues import GroupQueue, Queue, SampleQueue, Terms
from dataplane_core.ledger.rows import Row, RowChunks
from dataplane_core.ledger.selection import ClaimRequest, RankGroup, balance
from dataplane_core.ledger.shares import ShareBook
from dataplane_core.ledger.sizes import FieldBytes, Measure
from dataplane_core.ledger.tally import Tally
from dataplane_core.ledger.tasks import Claimed, Lease, Share, Task
from dataplane_core.schema import Form

_MAX_QUEUES = 32
"""Queues a task keeps; the one least recently claimed from goes when a claim needs another.

Most go before, see `Task.tell`.
"""


_MAX_COUNTED_AT_ONCE = 10_000
"""Open samples that are counted one by one; of more a queue is made, which knows its length."""


class PartitionBook(ShareBook):
    """The state of one partition. `Ledger` owns it; nothing here locks or waits."""

    def __init__(
        self,
        declaration: PartitionDeclaration,
        order: ClaimOrder | None = None,
        totals: Counter[str] | None = None,
        measure: Measure | None = None,
        revisions: Iterator[int] | None = None,
        fence: Iterator[int] | None = None,
    ) -> None:
        self.declaration = declaration
        self.totals: Counter[str] = Counter() if totals is None else totals
        self._order = order
        self.kinds: dict[str, str] = {}
        self.forms: dict[str, Form] = {}
        self.pending_kinds: dict[str, list[str]] = {}
        self.rows: dict[str, Row] = {}
        self._chunks = RowChunks()
        self.reserved: dict[str, int] = {}
        self.field_counts: dict[str, int] = {}
        self.tasks: dict[str, Task] = {name: Task() for name in declaration.consumer_tasks}
        self.leases: dict[str, Lease] = {}
        self.put_total = 0
        self.sizes = FieldBytes(measure)
        self._revisions = itertools.count(1) if revisions is None else revisions
        self._fence = itertools.count(1) if fence is None else fence
        self._timed: dict[Share, None] = {}
        self._has_origins = False
        self.touch()

    @property
    def held(self) -> int:
        """Samples that take room: those present and those on their way."""
        return len(self.rows) + len(self.reserved)

    @property
    def unput(self) -> int:
        """Declared samples that are still to be put."""
        return max(0, self.declaration.num_samples - self.put_total)

    def redeclare(self, declaration: PartitionDeclaration) -> None:
        """Replace the declaration; rows stay, and so do the cursors of tasks named again.

        Shares that ranks have not asked for are open to all again.
        """
        for name, task in self.tasks.items():
            shares = {id(share): share for share in task.assigned.values()}
            self.reopen_shares(name, shares.values())
        regrouped = declaration.grpo_group_size != self.declaration.grpo_group_size
        self.declaration = declaration
        kept = self.tasks
        self.tasks = {
            name: kept.get(name) or Task(open=dict(self.rows))
            for name in declaration.consumer_tasks
        }
        if regrouped:
            for task in self.tasks.values():
                task.queues.clear()
        self.leases = {
            token: lease for token, lease in self.leases.items() if lease.task_name in self.tasks
        }
        self.put_total = len(self.rows)
        self._forget_kinds_if_empty()
        self.touch()

    def task(self, task_name: str) -> Task:
        """The task, or `UnknownTaskError` naming the registered ones."""
        task = self.tasks.get(task_name)
        if task is None:
            raise UnknownTaskError(
                f"partition {self.declaration.partition_id!r} has no task {task_name!r}; "
                f"registered tasks: {listed(self.tasks) or 'none'}"
            )
        return task

    def write(
        self,
        sample_ids: Sequence[str],
        cells: Mapping[str, Sequence[Any]],
        tags: Sequence[Mapping[str, Any]] | None,
        sequence: Iterator[int],
        origin: str | None = None,
        *,
        nbytes: Mapping[str, int] | None = None,
        now: float,
    ) -> list[Any]:
        """Make fields and tags of samples visible; returns the cells that can be discarded now.

        Args:
            sample_ids: the samples.
            cells: field to one cell per sample.
            tags: one mapping per sample; None keeps what they have.
            sequence: gives new samples their places.
            origin: of the fields, None for none.
            nbytes: field to the bytes of ``cells``, if the store can tell.
            now: when it happens.
        """
        names = tuple(cells)
        by_sample = zip(*cells.values(), strict=True) if names else itertools.repeat(())
        replaced: list[Any] = []
        written: list[Row] = []
        new: dict[str, Row] = {}
        for sample_id, values in zip(sample_ids, by_sample, strict=False):
            row = self.rows.get(sample_id)
            if row is None:
                row = new[sample_id] = Row(sample_id, next(sequence), now)
                row.cells = dict(zip(names, values, strict=True))
            else:
                if len(new) == len(written):  # the first that is there
                    self._measure_overwritten(sample_ids, names)
                replaced += self._overwrite(row, dict(zip(names, values, strict=True)))
            written.append(row)
        if nbytes is not None:
            self.sizes.add(nbytes)
        if origin is not None or self._has_origins:
            self._has_origins = True
            note_origin(written, names, origin)
        for name in names:
            self.field_counts[name] = self.field_counts.get(name, 0) + len(new)
        self.rows.update(new)
        for row in new.values():
            self._chunks.add(row)
        self.put_total += len(new)
        if tags is not None:
            self._tag(written, tags)
        for task in self.tasks.values():
            task.open.update(new)
            if task.queues:
                task.tell([row for row in written if row.sample_id in task.open])
        return replaced

    def _measure_overwritten(self, sample_ids: Sequence[str], fields: Sequence[str]) -> None:
        """Take the bytes of what is about to be overwritten off the fields' own."""
        known = [name for name in fields if self.sizes.known and self.field_counts.get(name)]
        if not known:
            return
        rows = [self.rows[sample_id] for sample_id in sample_ids if sample_id in self.rows]
        for name in known:
            self.sizes.remove(name, [row.cells[name] for row in rows if name in row.cells])

    def _overwrite(self, row: Row, cells: Mapping[str, Any]) -> list[Any]:
        """Give a sample that is there fields, new or not; returns what can be discarded now."""
        replaced = []
        for name, cell in cells.items():
            if name in row.cells:
                replaced.append(row.cells[name])
            else:
                self.field_counts[name] = self.field_counts.get(name, 0) + 1
            row.cells[name] = cell
        if row.pins:
            row.stale.extend(replaced)
            return []
        return replaced

    def _tag(self, rows: Sequence[Row], tags: Sequence[Mapping[str, Any]]) -> None:
        moved = []
        for row, own in zip(rows, tags, strict=True):
            if self._order is not None and row.tags != own:
                moved.append(row.sample_id)
            row.tags = dict(own)
        for task in self.tasks.values():
            # Where a sample stands may have changed: the queues are made anew.
            if not task.open.keys().isdisjoint(moved):
                task.queues.clear()

    @staticmethod
    def _dequeue(task: Task, row: Row) -> None:
        for queue in task.queues.values():
            queue.discard(row)

    def lookup(self, sample_ids: Sequence[str], fields: Sequence[str]) -> list[Row]:
        """The rows in the order asked, or `MissingDataError` if one lacks one of ``fields``."""
        rows = self.rows
        found = [rows.get(sample_id) for sample_id in sample_ids]
        wanted = {name for name in fields if self.field_counts.get(name) != len(rows)}
        present = [row for row in found if row is not None]
        if wanted:  # not every sample of the partition has them
            present = [row for row in present if wanted <= row.cells.keys()]
        if len(present) != len(found):
            raise missing_data(
                self.declaration.partition_id,
                sample_ids,
                fields,
                lambda sample_id: rows[sample_id].cells if sample_id in rows else None,
            )
        return present

    def origins(self, sample_ids: Sequence[str], fields: Sequence[str]) -> dict[str, int]:
        """As `DataPlaneClient.read_origins`."""
        found = (self.rows[sample_id] for sample_id in sample_ids if sample_id in self.rows)
        return count_origins(found, fields)

    def prepare(self, request: ClaimRequest) -> bool:
        """Do a bounded part of what the first claim on its terms needs; whether all is done.

        Only that first claim looks at every open sample. Who serves others meanwhile calls this
        until it says True, and then `claim`, without anything in between.
        """
        task = self.task(request.task_name)
        return self._extend(task, self._begun_queue(task, request))

    def _queue(self, task: Task, request: ClaimRequest) -> Queue:
        queue = self._begun_queue(task, request)
        while not self._extend(task, queue):
            pass
        return queue

    @staticmethod
    def _extend(task: Task, queue: Queue) -> bool:
        """Add the next rows that a queue was not built from yet.

        Changes made meanwhile reach it as they reach any other queue. A change that arrives twice
        has no effect the second time.
        """
        unseen = queue.terms.unseen
        if unseen is not None:
            rows = next(unseen, None)
            if rows is None:
                queue.terms.unseen, queue.terms.told = None, 0
            else:
                for row in rows:
                    if row.sample_id in task.open:
                        queue.add(row)
        return queue.terms.unseen is None

    def _begun_queue(self, task: Task, request: ClaimRequest) -> Queue:
        terms = Terms(frozenset(request.required_fields), request.where)
        key = terms.required, frozenset(request.where), request.seed
        queue = task.queues.pop(key, None)
        if queue is None:
            size = self.declaration.grpo_group_size
            places = Places(request.seed, self._order)
            queue = SampleQueue(terms, places) if size is None else GroupQueue(terms, places, size)
            terms.unseen = iter(self._chunks)
            if len(task.queues) >= _MAX_QUEUES:
                del task.queues[next(iter(task.queues))]
        queue.terms.told = 0
        task.queues[key] = queue
        return queue

    def claim(self, request: ClaimRequest, now: float) -> Claimed | None:
        """Claim, or None if a whole batch has to wait. The one place where samples are handed out.

        Raises:
            UnknownTaskError: the task is not registered.
            InvalidRequestError: (a ValueError) the batch size is not a multiple of the group's.
        """
        task = self.task(request.task_name)
        size = self.declaration.grpo_group_size
        if size is not None and request.batch_size % size:
            raise InvalidRequestError(
                f"claim_meta(partition={self.declaration.partition_id!r}): batch_size "
                f"{request.batch_size} is not a multiple of grpo_group_size {size}; groups are "
                "claimed whole"
            )
        group = request.group
        if group is None:
            rows = self._draw(task, request, request.batch_size)
        else:
            rows = self._draw_share(task, request, group, now)
        if rows is None or (not rows and self._waits_for_leased(task, request)):
            return None
        return self._hand_out(task, request, rows, now)

    def _draw(self, task: Task, request: ClaimRequest, limit: int) -> list[Row] | None:
        """Take rows out of ``open``; None if the claim has to wait."""
        queue = self._queue(task, request)
        queue.places.check()
        last = self._nothing_more(task, queue)
        unit = request.batch_size
        if task.assigned and (last or not request.whole) and not queue.count(unit):
            self.reopen_shares(request.task_name, self._untimed_shares(task, request.group))
            last = self._nothing_more(task, queue)
        if request.whole and not last and queue.count(unit) < limit:
            return None
        rows = queue.take(limit, unit=unit, partial=last)
        for row in rows:
            del task.open[row.sample_id]
            self._dequeue(task, row)
        if rows:
            self.touch()
        return rows

    def _nothing_more(self, task: Task, queue: Queue) -> bool:
        """Whether every sample that may ever match is ready now."""
        if self.unput:
            return False
        if queue.terms.where:
            return not queue.terms.awaited
        return len(queue) == len(task.open)

    def _waits_for_leased(self, task: Task, request: ClaimRequest) -> bool:
        """Whether a claim that found nothing waits for what may come back to it.

        That is what is leased, and what waits under a lease's time for another rank.
        """
        if not (request.whole and request.wait_for_leased):
            return False
        if not request.where:
            return bool(task.leased) or any(self._timed_shares(task))
        shares = (share.rows for share in self._timed_shares(task))
        held = itertools.chain(task.leased, *shares)
        return any(request.matches(self.rows[sample_id].tags) for sample_id in held)

    def _draw_share(
        self, task: Task, request: ClaimRequest, group: RankGroup, now: float
    ) -> list[Row] | None:
        rank = request.dp_rank or 0
        waiting = self._take_share(task, request, group, rank, now)
        if waiting:
            return waiting
        drawn = self._draw(task, request, group.world * request.batch_size)
        if not drawn:
            return drawn
        units = self._units(drawn)
        parts = balance([sum(row.length for row in unit) for unit in units], group.world)
        if not parts[rank] and not task.missed.isdisjoint(row.sample_id for row in drawn):
            # Of fewer units than ranks the same ranks get one whenever they are drawn, and one of
            # them may be gone: who asks takes the first part.
            first = next(place for place, part in enumerate(parts) if part)
            parts[rank], parts[first] = parts[first], []
        batches = [[row for index in part for row in units[index]] for part in parts]
        mine, batches[rank] = self._split(batches[rank], request.batch_size)
        for other, batch in enumerate(batches):
            if batch:
                self._assign(request.task_name, group, other, batch, request.lease_s, now)
        return mine

    def _hand_out(self, task: Task, request: ClaimRequest, rows: list[Row], now: float) -> Claimed:
        if rows:
            self.totals["claims"] += 1
            self.totals["samples_claimed"] += len(rows)
            self.touch()
        if request.lease_s is None or not rows:
            task.settled.update(dict.fromkeys([row.sample_id for row in rows]))
            return Claimed(rows, None)
        group = request.group
        # The number makes tokens comparable: a later lease of the same samples has a larger one.
        number = next(self._fence)
        token = f"{number}.{secrets.token_hex(8)}"
        self.leases[token] = Lease(
            token=token,
            name=f"{number}-{secrets.token_hex(4)}",
            task_name=request.task_name,
            owner=request.owner,
            claimed=frozenset(row.sample_id for row in rows),
            rows={row.sample_id: row for row in rows},
            since=now,
            deadline=now + request.lease_s,
            seconds=request.lease_s,
            rank=None if group is None else (group, request.dp_rank or 0),
        )
        task.leased.update((row.sample_id, token) for row in rows)
        return Claimed(rows, token)

    def tally(self, request: ClaimRequest) -> Tally:
        """What a claim could have had, counted bit by bit."""
        return Tally(iter(self._chunks), self.task(request.task_name), request)

    def claim_timeout(
        self, request: ClaimRequest, timeout_s: float, now: float, tally: Tally | None = None
    ) -> ClaimTimeoutError:
        """The error of a claim that waited in vain, with what is missing.

        Args:
            request: the claim.
            timeout_s: how long it waited, in seconds.
            now: the time.
            tally: of the claim, counted to its end; None to count it now.
        """
        task = self.task(request.task_name)
        tally = tally or self.tally(request)
        while not tally.step():
            pass
        leases = [lease for lease in self.leases.values() if lease.task_name == request.task_name]
        holders: Counter[str] = Counter()
        for lease in leases:
            holders[lease.owner] += len(lease.rows)
        timed = (share.deadline for share in self._timed_shares(task))
        first_expiry = min([*timed, *(lease.deadline for lease in leases)], default=None)
        return self.declaration.claim_timeout(
            request.task_name,
            ready=tally.ready,
            present=tally.present,
            holders=holders,
            first_expiry_s=None if first_expiry is None else max(0.0, first_expiry - now),
            claimer=request.owner,
            assigned=len(task.assigned),
            unput=self.unput,
            lacking={name: count for name, count in tally.lacking.items() if count},
            batch_size=request.batch_size,
            timeout_s=timeout_s,
        )

    def drop(self, sample_ids: Iterable[str]) -> list[Row]:
        """Take samples out of the partition; unknown ids are passed over."""
        dropped = []
        for sample_id in sample_ids:
            row = self.rows.pop(sample_id, None)
            if row is None:
                continue
            self._chunks.discard(row)
            row.dropped = True
            dropped.append(row)
            for task in self.tasks.values():
                if task.open.pop(sample_id, None) is not None:
                    self._dequeue(task, row)
                token = task.leased.pop(sample_id, None)
                if token is not None:
                    lease = self.leases[token]
                    del lease.rows[sample_id]
                    if not lease.rows:
                        del self.leases[token]
                share = task.assigned.get(sample_id)
                if share is not None:
                    self.unassign(task, share, [sample_id])
                task.settled.pop(sample_id, None)
                task.missed.discard(sample_id)
        if self.rows:
            for name in self.field_counts:
                cells = [row.cells[name] for row in dropped if name in row.cells]
                self.field_counts[name] -= len(cells)
                self.sizes.remove(name, cells)
        self._forget_kinds_if_empty()
        self.touch()
        return dropped

    def dismantle(self, count: int) -> list[Row]:
        """Take up to ``count`` samples out of a partition that is no longer registered."""
        rows: list[Row] = []
        while self.rows and len(rows) < count:
            sample_id, row = self.rows.popitem()
            self._chunks.discard(row)
            row.dropped = True
            rows.append(row)
            for task in self.tasks.values():
                task.open.pop(sample_id, None)
                task.settled.pop(sample_id, None)
                token = task.leased.pop(sample_id, None)
                if token is not None and token in self.leases:
                    self.leases[token].rows.pop(sample_id, None)
        for task in self.tasks.values():
            for queue in task.queues.values():
                queue.shed(len(rows))
        return rows

    def _forget_kinds_if_empty(self) -> None:
        if not self.rows:
            self.kinds = {}
            self.forms = {}
            self.field_counts = {}
            self.sizes.forget()

    def consumed(self, task_names: Iterable[str]) -> bool:
        """Whether there are samples and each task has settled every one."""
        return bool(self.rows) and all(
            name in self.tasks and len(self.tasks[name].settled) == len(self.rows)
            for name in task_names
        )

    def counts(self, task_name: str, required_fields: Sequence[str]) -> TaskCounts:
        """Where every sample put since the registration stands for a task."""
        task = self.task(task_name)
        ready = self._count_ready(task, frozenset(required_fields))
        return TaskCounts(
            put=self.put_total,
            ready=ready,
            not_ready=len(task.open) - ready,
            leased=len(task.leased) + len(task.assigned),
            acknowledged=len(task.settled),
            cleared=self.put_total - len(self.rows),
        )

    def prepare_counts(self, task_name: str, required_fields: Sequence[str]) -> bool:
        """Do a bounded part of what `counts` needs; whether all is done, as `prepare`."""
        task, required = self.task(task_name), frozenset(required_fields)
        quick = len(task.open) <= _MAX_COUNTED_AT_ONCE or task.counted[:2] == (
            self.revision,
            required,
        )
        return quick or self.prepare(ClaimRequest(task_name, tuple(required_fields), 1))

    def _count_ready(self, task: Task, required: frozenset[str]) -> int:
        for (fields, where, _), queue in task.queues.items():
            if fields == required and not where and queue.terms.unseen is None:
                return len(queue)
        if task.counted[:2] == (self.revision, required):
            return task.counted[2]
        # Column by column in C; those that every sample has need no look.
        counts = {name: self.field_counts.get(name, 0) for name in required}
        if task.open and 0 in counts.values():
            return 0
        cells: list[Mapping[str, Any]] = list(map(attrgetter("cells"), task.open.values()))
        for name in sorted(required, key=lambda name: counts[name]):
            if counts[name] < len(self.rows):
                cells = list(compress(cells, map(contains, cells, repeat(name))))
        task.counted = self.revision, required, len(cells)
        return len(cells)
