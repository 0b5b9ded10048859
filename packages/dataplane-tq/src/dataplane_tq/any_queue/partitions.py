"""Partitions of a TransferQueue that another program started, as of the newest read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import numpy.typing as npt

from dataplane_core import FieldSummary, PartitionSummary, TaskSummary

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

_RETRY_S = 30.0


@dataclass(frozen=True, eq=False)
class Partition:
    """One partition as of the newest read.

    Attributes:
        fields: name to type, number of samples and bytes.
        tasks: names of the tasks that have claimed, or whose first claim is blocked.
        expected: number of samples, including those with an index but no key or value yet.
        checksum: checksum of the arrays.
        revision: number of the newest read in which the arrays had changed.
        rows: (samples,), TransferQueue's index of each sample.
        keys: (samples,), hash of each sample's key.
        since: (samples,), monotonic time at which each was first seen.
        written: (samples, fields), whether a sample has a field.
        acknowledged: (samples, tasks), whether TransferQueue marks a sample as consumed by a task.
    """

    fields: dict[str, tuple[str | None, int, int | None]]
    tasks: tuple[str, ...]
    expected: int
    checksum: int
    revision: int
    rows: Ints
    keys: Ints
    since: Floats
    written: Flags
    acknowledged: Flags


class Claim(msgspec.Struct, frozen=True):
    """A claim that is blocked inside the controller."""

    partition: str
    task: str
    fields: tuple[str, ...]


class BlockedClaims:
    """The fields of the tasks' blocked claims.

    TransferQueue ends a blocked claim after some seconds, and the program claims again. Between the
    two, and while the claim of another task blocks the controller, no read has it. So a claim
    counts as blocked until its task claims samples, and for at most 30 s after the last read that
    had it.
    """

    def __init__(self) -> None:
        self._claims: dict[tuple[str, str], _Blocked] = {}

    def update(
        self, claims: Iterable[Claim], partitions: Mapping[str, Partition], now: float
    ) -> None:
        """Take the blocked claims and the partitions of a read at time ``now``."""
        self._claims = {
            place: blocked
            for place, blocked in self._claims.items()
            if now - blocked.seen_s < _RETRY_S
            and blocked.acknowledged == _acknowledged(partitions, *place)
        }
        for claim in claims:
            self._claims[claim.partition, claim.task] = _Blocked(
                fields=claim.fields,
                acknowledged=_acknowledged(partitions, claim.partition, claim.task),
                seen_s=now,
            )

    def fields(self, partition: str, task: str) -> tuple[str, ...] | None:
        """Return the fields that a blocked claim of the task requires; None if none is blocked."""
        blocked = self._claims.get((partition, task))
        return None if blocked is None else blocked.fields

    def tasks(self, partition: str) -> list[str]:
        """Return the tasks that have a blocked claim in the partition."""
        return [task for name, task in self._claims if name == partition]


@dataclass(frozen=True)
class _Blocked:
    fields: tuple[str, ...]
    acknowledged: int
    seen_s: float


def _acknowledged(partitions: Mapping[str, Partition], name: str, task: str) -> int:
    partition = partitions.get(name)
    if partition is None or task not in partition.tasks:
        return 0
    return int(partition.acknowledged[:, partition.tasks.index(task)].sum())


class PartitionRead(msgspec.Struct, frozen=True):
    """Answer of `remote_reads.read_controller` about one partition."""

    fields: dict[str, tuple[str | None, int, int | None]]
    tasks: tuple[str, ...]
    expected: int
    checksum: int
    rows: bytes | None = None
    keys: bytes = b""
    written: bytes = b""
    acknowledged: bytes = b""


def merge_read(
    previous: Partition | None, read: PartitionRead, number: int, now: float
) -> Partition:
    """Return the partition after the read with this number, at time ``now``."""
    if read.rows is None:
        assert previous is not None  # the answer lacks arrays only if their checksum was sent
        return replace(
            previous,
            fields=read.fields,
            tasks=read.tasks,
            expected=read.expected,
            acknowledged=previous.acknowledged[:, : len(read.tasks)],
        )
    rows = np.frombuffer(read.rows, dtype=np.int64)
    keys = np.frombuffer(read.keys, dtype=np.int64)
    return Partition(
        fields=read.fields,
        tasks=read.tasks,
        expected=read.expected,
        checksum=read.checksum,
        revision=number,
        rows=rows,
        keys=keys,
        since=_first_seen(previous, rows, keys, now),
        written=_unpacked(read.written, len(rows), len(read.fields)),
        acknowledged=_unpacked(read.acknowledged, len(rows), len(read.tasks)),
    )


def add_tasks(
    partition: Partition, tasks: Iterable[str], previous: Partition | None, number: int
) -> Partition:
    """Return the partition of the read with this number with the missing ones of ``tasks``.

    TransferQueue records a task once all fields of a claim exist in the partition.
    """
    missing = tuple(task for task in tasks if task not in partition.tasks)
    names = partition.tasks + missing
    none = np.zeros((len(partition.rows), len(missing)), dtype=np.bool_)
    return replace(
        partition,
        tasks=names,
        acknowledged=np.hstack([partition.acknowledged, none]),
        revision=partition.revision if previous and previous.tasks == names else number,
    )


def _first_seen(previous: Partition | None, rows: Ints, keys: Ints, now: float) -> Floats:
    """Return when each sample was first seen; an index with another key is another sample."""
    since = np.full(len(rows), now)
    if previous is None or not len(previous.rows) or not len(rows):
        return since
    order = np.argsort(previous.rows)
    place = order[np.searchsorted(previous.rows, rows, sorter=order).clip(max=len(order) - 1)]
    same = (previous.rows[place] == rows) & (previous.keys[place] == keys)
    since[same] = previous.since[place[same]]
    return since


def _unpacked(bits: bytes, rows: int, columns: int) -> Flags:
    flags = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=rows * columns)
    return flags.reshape(rows, columns).astype(np.bool_)


def column(partition: Partition, field: str) -> Flags:
    """Return which samples have the field, (samples,); none if the partition lacks it."""
    names = list(partition.fields)
    if field not in names:
        return np.zeros(len(partition.rows), dtype=np.bool_)
    return partition.written[:, names.index(field)]


def summarize(
    name: str, partition: Partition, blocked_claims: BlockedClaims, now: float
) -> PartitionSummary:
    """Return the summary of a partition at time ``now``."""
    sizes = [nbytes for _, _, nbytes in partition.fields.values()]
    return PartitionSummary(
        partition_id=name,
        declared=partition.expected,
        put=len(partition.rows),
        present=len(partition.rows),
        reserved=0,
        group_size=None,
        fields=tuple(
            FieldSummary(name=field, kind=kind, declared=True, written=written, nbytes=nbytes)
            for field, (kind, written, nbytes) in partition.fields.items()
        ),
        tasks=tuple(
            _task(name, partition, place, blocked_claims, now)
            for place in range(len(partition.tasks))
        ),
        nbytes=None if None in sizes else sum(size or 0 for size in sizes),
        revision=partition.revision,
    )


def _task(
    partition_id: str, partition: Partition, place: int, blocked_claims: BlockedClaims, now: float
) -> TaskSummary:
    task = partition.tasks[place]
    acknowledged = partition.acknowledged[:, place]
    open_since = partition.since[~acknowledged]
    return TaskSummary(
        name=task,
        unclaimed=len(open_since),
        leased=0,
        acknowledged=len(acknowledged) - len(open_since),
        leases=0,
        oldest_unclaimed_s=max(0.0, now - float(open_since.min())) if len(open_since) else None,
        blocked_claim_fields=blocked_claims.fields(partition_id, task),
    )
