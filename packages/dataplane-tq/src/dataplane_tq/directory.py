"""`PartitionDirectory`: what TransferQueue's controller does not keep.

One Ray actor beside the controller. It holds the partitions' declarations, the dtype of each field,
which ids were put and how much room there is, so that a put is refused before the store sees it, on
every process alike; and it wakes blocked claims, so that nobody polls the controller. It never
holds a sample's values.

Every method is a coroutine on the actor's one event loop: between two awaits nothing else runs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any  # Any: TransferQueue's connection facts are its own types

from dataplane_core import PartitionNotFoundError, UnknownTaskError
from dataplane_core.declaration import PartitionDeclaration, capacity_exceeded, check_kinds
from dataplane_core.errors import listed


@dataclass(frozen=True)
class ClaimView:
    """What a claim must know besides the controller's state.

    Attributes:
        version: changes with every commit and clear of the partition.
        unput: declared samples that are still to be put.
        declaration: the partition's.
    """

    version: int
    unput: int
    declaration: PartitionDeclaration


@dataclass
class _Partition:
    """``reserved`` are those of ``sample_ids`` whose first put is still on its way to the store."""

    declaration: PartitionDeclaration
    kinds: dict[str, str] = field(default_factory=dict)
    sample_ids: set[str] = field(default_factory=set)
    reserved: set[str] = field(default_factory=set)
    put: int = 0
    version: int = 0


class PartitionDirectory:
    """The actor's class; `dataplane_tq.topology` starts it.

    Args:
        capacity: samples that all partitions together may hold.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._topology: dict[str, Any] | None = None
        self._partitions: dict[str, _Partition] = {}
        self._changed = asyncio.Condition()

    async def set_topology(self, topology: dict[str, Any]) -> None:
        """Store how clients connect; until then `topology` answers None."""
        self._topology = topology

    async def topology(self) -> dict[str, Any] | None:
        """How clients connect to the controller and the storage units."""
        return self._topology

    async def register(self, declaration: PartitionDeclaration) -> None:
        """Declare a partition, or replace its declaration."""
        partition = self._partitions.get(declaration.partition_id)
        if partition is None:
            partition = self._partitions[declaration.partition_id] = _Partition(declaration)
        partition.declaration = declaration
        partition.put = len(partition.sample_ids - partition.reserved)
        if not partition.sample_ids:
            partition.kinds = {}
        await self._notify(partition)

    async def declaration(self, partition_id: str) -> PartitionDeclaration | None:
        """The partition's declaration, None if it is not registered."""
        partition = self._partitions.get(partition_id)
        return None if partition is None else partition.declaration

    async def admit(
        self,
        partition_id: str,
        sample_ids: Sequence[str],
        kinds: Mapping[str, str],
        timeout_s: float,
    ) -> list[str]:
        """Reserve room for a put and fix the kinds of its fields, or refuse it.

        Returns:
            The ids that are new, to `commit` or, if the put fails, to `retract`.

        Raises:
            PartitionNotFoundError, SchemaMismatchError: at once.
            CapacityExceeded: if there is no room after ``timeout_s`` seconds.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            partition = self._partition(partition_id)
            check_kinds(kinds, partition.kinds, partition_id=partition_id)
            new = [name for name in sample_ids if name not in partition.sample_ids]
            held = sum(len(other.sample_ids) for other in self._partitions.values())
            if held + len(new) <= self._capacity:
                break
            remaining = deadline - time.monotonic()
            if remaining <= 0 or len(new) > self._capacity:
                raise capacity_exceeded(
                    partition_id, new=len(new), held=held, capacity=self._capacity
                )
            await self._wait(remaining)
        partition.kinds.update(kinds)
        partition.sample_ids.update(new)
        partition.reserved.update(new)
        return new

    async def commit(self, partition_id: str, new_ids: Sequence[str]) -> None:
        """Say that a put is readable, and wake the claims that wait.

        Only now its new samples stop counting as still to be put: until the controller knows them,
        a claim must not conclude that nothing more can come.
        """
        partition = self._partitions.get(partition_id)
        if partition is not None:
            arrived = partition.reserved & set(new_ids)
            partition.reserved -= arrived
            partition.put += len(arrived)
            await self._notify(partition)

    async def retract(self, partition_id: str, new_ids: Sequence[str]) -> None:
        """Undo the reservation of a put that failed."""
        partition = self._partitions.get(partition_id)
        if partition is not None:
            await self._drop(partition, new_ids)

    async def cleared(self, partition_id: str, sample_ids: Sequence[str]) -> None:
        """Say that samples are gone from the store."""
        partition = self._partitions.get(partition_id)
        if partition is not None:
            await self._drop(partition, sample_ids)

    async def forget(self, partition_id: str) -> bool:
        """Drop a partition's declaration; True if it held samples."""
        partition = self._partitions.pop(partition_id, None)
        if partition is None:
            return False
        await self._notify(partition)
        return bool(partition.sample_ids)

    async def known_ids(self, partition_id: str, sample_ids: Sequence[str]) -> list[str]:
        """Those of ``sample_ids`` that were put and not cleared."""
        present = self._partition(partition_id).sample_ids
        return [name for name in sample_ids if name in present]

    async def claim_view(self, partition_id: str, task_name: str) -> ClaimView:
        """The partition as a claim of ``task_name`` must see it.

        Raises:
            PartitionNotFoundError, UnknownTaskError: naming what is registered.
        """
        partition = self._partition(partition_id)
        tasks = partition.declaration.consumer_tasks
        if task_name not in tasks:
            raise UnknownTaskError(
                f"partition {partition_id!r} has no task {task_name!r}; registered tasks: "
                f"{listed(tasks) or 'none'}"
            )
        return ClaimView(
            version=partition.version,
            unput=max(0, partition.declaration.num_samples - partition.put),
            declaration=partition.declaration,
        )

    async def wait_for_change(self, partition_id: str, version: int, timeout_s: float) -> None:
        """Return when the partition is no longer at ``version``, or after ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        while True:
            partition = self._partitions.get(partition_id)
            remaining = deadline - time.monotonic()
            if partition is None or partition.version != version or remaining <= 0:
                return
            await self._wait(remaining)

    def _partition(self, partition_id: str) -> _Partition:
        partition = self._partitions.get(partition_id)
        if partition is None:
            raise PartitionNotFoundError(
                f"partition {partition_id!r} is not registered; registered: "
                f"{listed(sorted(self._partitions)) or 'none'}"
            )
        return partition

    async def _drop(self, partition: _Partition, sample_ids: Sequence[str]) -> None:
        partition.sample_ids.difference_update(sample_ids)
        partition.reserved.difference_update(sample_ids)
        if not partition.sample_ids:
            partition.kinds = {}
        await self._notify(partition)

    async def _notify(self, partition: _Partition) -> None:
        partition.version += 1
        async with self._changed:
            self._changed.notify_all()

    async def _wait(self, timeout_s: float) -> None:
        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait(), timeout_s)
            except TimeoutError:
                return
