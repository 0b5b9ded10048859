"""`Shortage`: the samples that a timed-out claim found ready, and those it lacked."""

from __future__ import annotations

import math
from collections import Counter

from dataplane_core.errors import ClaimTimeoutError
from dataplane_core.ledger.assignments import Assignment
from dataplane_core.ledger.partition import Partition
from dataplane_core.ledger.selection import ClaimRequest


class Shortage:
    """Count of a task's open samples that meet a claim's conditions, for its error.

    Attributes:
        present: number of samples that meet the conditions.
        ready: number of these samples that have all fields.
        lacking: field to the number of these samples that lack it.
    """

    def __init__(self, partition: Partition, request: ClaimRequest) -> None:
        self._partition = partition
        self._request = request
        self._task = partition.task(request.task_name)
        rows, named = partition.rows, request.sample_ids
        self._chunks = rows.in_chunks()
        self._absent = 0
        if named is not None:
            present = [row for each in named if (row := rows.get(each)) is not None]
            self._chunks = iter([present])
            self._absent = len(named) - len(present)
        self.present = self.ready = 0
        self.lacking = dict.fromkeys(request.required_fields, 0)

    def step(self) -> bool:
        """Count the next chunk; return True once there are no more."""
        rows = next(self._chunks, None)
        if rows is None:
            return True
        for row in rows:
            if self._task not in row.states and self._request.matches(row.tags):
                self.present += 1
                missing = [name for name in self.lacking if name not in row.cells]
                self.ready += not missing
                for name in missing:
                    self.lacking[name] += 1
        return False

    def error(self, timeout_s: float, now: float) -> ClaimTimeoutError:
        """Count the remaining chunks; return the error of a claim blocked for ``timeout_s``."""
        while not self.step():
            pass
        # Look the task up again: the partition may have been registered again since.
        partition = self._partition
        task = partition.task(self._request.task_name)
        named = self._request.sample_ids
        leases = partition.leases.of(task)
        if named is not None:
            leases = [lease for lease in leases if not lease.rows.keys().isdisjoint(named)]
        holders: Counter[str] = Counter()
        for lease in leases:
            held = lease.rows if named is None else lease.rows.keys() & set(named)
            holders[lease.owner] += len(held)
        assigned, timed = task.assigned, list(task.assignments.timed)
        if named is not None:
            present = (row for each in named if (row := partition.rows.get(each)) is not None)
            states = [row.states.get(task) for row in present]
            assignments = [each for each in states if isinstance(each, Assignment)]
            assigned = len(assignments)
            timed = [each for each in assignments if each.deadline < math.inf]
        deadlines = [each.deadline for each in timed]
        deadlines += (lease.deadline for lease in leases)
        return partition.declaration.claim_timeout(
            task.name,
            ready=self.ready,
            present=self.present,
            holders=holders,
            first_expiry_s=max(0.0, min(deadlines) - now) if deadlines else None,
            claimer=self._request.owner,
            assigned=assigned,
            large_group=partition.large_group(self._request),
            not_put=partition.not_put if named is None else 0,
            absent=None if named is None else self._absent,
            lacking={name: count for name, count in self.lacking.items() if count},
            batch_size=self._request.batch_size,
            timeout_s=timeout_s,
        )
