"""What an onlooker sees of a ledger: summaries that cost nothing, and pages of samples."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any  # Any: tags hold the caller's own primitives

from dataplane_core.ledger.partition import PartitionBook


@dataclass(frozen=True, kw_only=True)
class FieldSummary:
    """One field of a partition: its kind (None until written) and how many samples have it."""

    name: str
    kind: str | None
    declared: bool
    written: int


@dataclass(frozen=True, kw_only=True)
class TaskSummary:
    """One task of a partition: how many present samples are where."""

    name: str
    unclaimed: int
    leased: int
    settled: int
    leases: int


@dataclass(frozen=True, kw_only=True)
class PartitionSummary:
    """One partition in numbers; making it costs fields plus tasks, not samples."""

    partition_id: str
    declared: int
    put: int
    present: int
    reserved: int
    group_size: int | None
    fields: tuple[FieldSummary, ...]
    tasks: tuple[TaskSummary, ...]
    enums: dict[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class SampleState:
    """One sample: its written fields, its tags, each task's state of it, and fields' origins."""

    sample_id: str
    fields: tuple[str, ...]
    tags: dict[str, Any]
    tasks: dict[str, str]
    origins: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class StorageSummary:
    """One storage unit: its name, its node, and its bytes; of a full one little is ``free``."""

    name: str
    node: str
    capacity: int
    used: int
    free: int


def summarise(partition: PartitionBook) -> PartitionSummary:
    """The numbers of one partition."""
    declared = partition.declaration.fields
    names = dict.fromkeys([*declared, *partition.field_counts])
    leases: dict[str, int] = {}
    for lease in partition.leases.values():
        leases[lease.task_name] = leases.get(lease.task_name, 0) + 1
    return PartitionSummary(
        partition_id=partition.declaration.partition_id,
        declared=partition.declaration.num_samples,
        put=partition.put_total,
        present=len(partition.rows),
        reserved=len(partition.reserved),
        group_size=partition.declaration.grpo_group_size,
        fields=tuple(
            FieldSummary(
                name=name,
                kind=partition.kinds.get(name),
                declared=name in declared,
                written=partition.field_counts.get(name, 0),
            )
            for name in names
        ),
        tasks=tuple(
            TaskSummary(
                name=name,
                unclaimed=len(task.open) + len(task.assigned),
                leased=len(task.leased),
                settled=len(task.settled),
                leases=leases.get(name, 0),
            )
            for name, task in partition.tasks.items()
        ),
        enums=partition.declaration.enums,
    )


def page(partition: PartitionBook, start: int, limit: int) -> list[SampleState]:
    """Up to ``limit`` samples from place ``start`` on, in the order of first puts."""

    def state(task_name: str, sample_id: str) -> str:
        task = partition.tasks[task_name]
        if sample_id in task.open:
            return "unclaimed"
        if sample_id in task.assigned:
            return "assigned"
        return "leased" if sample_id in task.leased else "settled"

    return [
        SampleState(
            sample_id=row.sample_id,
            fields=tuple(row.cells),
            tags=dict(row.tags),
            tasks={name: state(name, row.sample_id) for name in partition.tasks},
            origins=dict(row.origins),
        )
        for row in itertools.islice(partition.rows.values(), start, start + limit)
    ]
