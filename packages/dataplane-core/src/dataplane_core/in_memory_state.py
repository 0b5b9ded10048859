"""The state behind `InMemoryDataPlaneClient`: partitions, rows, cursors and leases.

Nothing here locks or waits; the client holds the store's condition around every call.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any  # Any: rows and tags are the caller's own values

from dataplane_core.declaration import PartitionDeclaration


@dataclass
class Lease:
    task: str
    sample_ids: list[str]
    deadline: float


@dataclass
class Task:
    """One task's view of a partition; a present sample is in exactly one of the three."""

    open: dict[str, None] = field(default_factory=dict)
    leased: dict[str, str] = field(default_factory=dict)
    settled: set[str] = field(default_factory=set)

    def forget(self, sample_id: str) -> None:
        self.open.pop(sample_id, None)
        self.leased.pop(sample_id, None)
        self.settled.discard(sample_id)


@dataclass
class Partition:
    declaration: PartitionDeclaration
    kinds: dict[str, str] = field(default_factory=dict)
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    tags: dict[str, dict[str, Any]] = field(default_factory=dict)
    tasks: dict[str, Task] = field(default_factory=dict)
    leases: dict[str, Lease] = field(default_factory=dict)
    put_total: int = 0

    def redeclare(self, declaration: PartitionDeclaration) -> None:
        self.declaration = declaration
        self.tasks = {
            name: self.tasks.get(name) or Task(open=dict.fromkeys(self.rows))
            for name in declaration.consumer_tasks
        }
        self.leases = {
            token: lease for token, lease in self.leases.items() if lease.task in self.tasks
        }
        self.put_total = len(self.rows)
        if not self.rows:
            self.kinds = {}

    def ready(self, task: Task, required: Iterable[str]) -> list[str]:
        wanted = set(required)
        return [sample_id for sample_id in task.open if wanted <= self.rows[sample_id].keys()]

    def expire_leases(self, now: float) -> None:
        for token in [token for token, lease in self.leases.items() if lease.deadline <= now]:
            self.end_lease(token, settle=False)

    def end_lease(self, token: str, *, settle: bool) -> None:
        lease = self.leases.pop(token)
        task = self.tasks[lease.task]
        for sample_id in lease.sample_ids:
            if task.leased.get(sample_id) != token:
                continue
            del task.leased[sample_id]
            if settle:
                task.settled.add(sample_id)
            else:
                task.open[sample_id] = None

    def drop(self, sample_id: str) -> None:
        if self.rows.pop(sample_id, None) is not None:
            self.tags.pop(sample_id, None)
            for task in self.tasks.values():
                task.forget(sample_id)
        if not self.rows:
            self.kinds = {}


class Store:
    """What the clients of one process share."""

    def __init__(self, capacity: int | None) -> None:
        self.capacity = capacity
        self.changed = threading.Condition()
        self.partitions: dict[str, Partition] = {}
        self.closed = False

    @property
    def held(self) -> int:
        return sum(len(partition.rows) for partition in self.partitions.values())
