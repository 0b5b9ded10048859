"""`InMemoryDataPlaneClient`: the contract inside one process.

Serves notebooks and tests, and is the reference that other clients are compared with. All state
is behind one condition variable, which every change notifies; a blocked claim or put waits on it,
so it wakes when something changed and not on a timer.
"""

from __future__ import annotations

import copy
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar  # Any: rows and tags are the caller's own values

import torch

from dataplane_core import rows as row_codec
from dataplane_core.client import Capabilities, DataPlaneClient, TaskCounts
from dataplane_core.config import DataPlaneConfig, validate_config
from dataplane_core.declaration import (
    PartitionDeclaration,
    capacity_exceeded,
    check_enums,
    check_kinds,
    check_put,
    fields_to_read,
    missing_data,
    tagged_lengths,
)
from dataplane_core.errors import (
    ClaimTimeoutError,
    ClosedError,
    ConfigError,
    InvalidRequestError,
    LeaseLostError,
    PartitionNotFoundError,
    SamplesLeasedError,
    UnknownTaskError,
    listed,
)
from dataplane_core.in_memory_state import Lease, Partition, Store, Task
from dataplane_core.meta import KVBatchMeta

if TYPE_CHECKING:
    from tensordict import TensorDict

LEASE = "lease"
"""``extra_info`` key under which a claim carries its lease token."""

_DEFAULT_PUT_TIMEOUT_S = 60.0


_attachable: Store | None = None
_attachable_lock = threading.Lock()


class InMemoryDataPlaneClient(DataPlaneClient):
    """The whole contract, leases and backpressure included, inside one process.

    Args:
        cfg: reads ``storage_capacity`` (samples; unlimited without it), ``ack_timeout_ms`` (how
            long a put waits for room; 60 s without it) and ``claim_lease_s``. None is an
            unlimited store without leases.
        bootstrap: True makes a new store, which ends with this client; False attaches to the
            store that was made last in this process.

    Raises:
        ConfigError: (a ValueError) on a wrong configuration, or with ``bootstrap=False`` if there
            is no open store to attach to.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        read_your_writes=True,
        no_torn_rows=True,
        exclusive_claims=True,
        bounded_waits=True,
        leases=True,
        conservation=True,
        safe_clear=True,
        backpressure=True,
        survivable=True,
    )

    def __init__(
        self, cfg: DataPlaneConfig | Mapping[str, Any] | None = None, *, bootstrap: bool = True
    ) -> None:
        global _attachable
        valid = validate_config({"enabled": True, "impl": "in_memory"} if cfg is None else cfg)
        self._lease_s = valid.get("claim_lease_s")
        timeout_ms = valid.get("ack_timeout_ms")
        self._put_timeout_s = _DEFAULT_PUT_TIMEOUT_S if timeout_ms is None else timeout_ms / 1000
        self._owner = bootstrap
        self._closed = False
        with _attachable_lock:
            if bootstrap:
                self._store = _attachable = Store(valid.get("storage_capacity"))
            elif _attachable is None or _attachable.closed:
                raise ConfigError(
                    "in_memory client with bootstrap=False: no open store in this process; "
                    "build a client with bootstrap=True first"
                )
            else:
                self._store = _attachable

    def register_partition(
        self,
        partition_id: str,
        fields: list[str],
        num_samples: int,
        consumer_tasks: list[str],
        grpo_group_size: int | None = None,
        enums: dict[str, list[str]] | None = None,
    ) -> None:
        declaration = PartitionDeclaration.checked(
            partition_id, fields, num_samples, consumer_tasks, grpo_group_size, enums
        )
        with self._store.changed:
            self._check_open()
            partition = self._store.partitions.get(partition_id)
            if partition is None:
                partition = self._store.partitions[partition_id] = Partition(declaration)
            partition.redeclare(declaration)
            self._store.changed.notify_all()

    def put_samples(
        self,
        sample_ids: list[str],
        partition_id: str,
        fields: TensorDict | None = None,
        tags: list[dict[str, Any]] | None = None,
    ) -> KVBatchMeta:
        check_put(sample_ids, partition_id, tags)
        columns = {} if fields is None else row_codec.split_rows(fields, len(sample_ids))
        kinds = {name: column.kind for name, column in columns.items()}
        # Copies are made before the lock is taken: they are the long part.
        values = [
            {name: _own(column.rows[i]) for name, column in columns.items()}
            for i in range(len(sample_ids))
        ]
        own_tags = None if tags is None else [copy.deepcopy(tag) for tag in tags]
        deadline = time.monotonic() + self._put_timeout_s
        with self._store.changed:
            partition = self._make_room(partition_id, sample_ids, deadline)
            check_kinds(kinds, partition.kinds, partition_id=partition_id)
            check_enums(columns, partition.declaration)
            partition.kinds.update(kinds)
            for i, sample_id in enumerate(sample_ids):
                if sample_id not in partition.rows:
                    partition.rows[sample_id] = {}
                    partition.put_total += 1
                    for task in partition.tasks.values():
                        task.open[sample_id] = None
                partition.rows[sample_id].update(values[i])
                if own_tags is not None:
                    partition.tags[sample_id] = own_tags[i]
            self._store.changed.notify_all()
        return KVBatchMeta(
            partition_id=partition_id,
            task_name=None,
            sample_ids=list(sample_ids),
            fields=list(columns) or None,
            tags=None if tags is None else [dict(tag) for tag in tags],
        )

    def _make_room(self, partition_id: str, sample_ids: list[str], deadline: float) -> Partition:
        """Wait until the new ones of ``sample_ids`` fit; the partition may change while waiting."""
        while True:
            self._check_open()
            partition = self._partition(partition_id)
            new = sum(sample_id not in partition.rows for sample_id in sample_ids)
            capacity = self._store.capacity
            if capacity is None or self._store.held + new <= capacity:
                return partition
            remaining = deadline - time.monotonic()
            if remaining <= 0 or new > capacity:
                raise capacity_exceeded(
                    partition_id, new=new, held=self._store.held, capacity=capacity
                )
            self._store.changed.wait(remaining)

    def get_samples(
        self, sample_ids: list[str], partition_id: str, select_fields: list[str]
    ) -> TensorDict:
        with self._store.changed:
            self._check_open()
            partition = self._partition(partition_id)
            wanted = [partition.rows.get(sample_id) for sample_id in sample_ids]
            if any(row is None or not row.keys() >= set(select_fields) for row in wanted):
                raise missing_data(
                    partition_id,
                    sample_ids,
                    select_fields,
                    lambda sample_id: partition.rows.get(sample_id),
                )
            columns = {
                name: row_codec.Column(
                    partition.kinds[name], [row[name] for row in wanted if row is not None]
                )
                for name in select_fields
                if sample_ids
            }
        # A stored row is never changed in place, so it can be copied outside the lock.
        for column in columns.values():
            if column.kind == row_codec.OBJECT:
                column.rows[:] = copy.deepcopy(column.rows)
        return row_codec.collate(columns, len(sample_ids))

    def get_data(self, meta: KVBatchMeta, select_fields: list[str] | None = None) -> TensorDict:
        names = fields_to_read(meta, select_fields)
        return self.get_samples(meta.sample_ids, meta.partition_id, names)

    def claim_meta(
        self,
        partition_id: str,
        task_name: str,
        required_fields: list[str],
        batch_size: int,
        dp_rank: int | None = None,
        blocking: bool = True,
        timeout_s: float = 60.0,
    ) -> KVBatchMeta:
        if batch_size < 1:
            raise InvalidRequestError(f"claim_meta: batch_size {batch_size}; expected at least 1")
        deadline = time.monotonic() + timeout_s
        with self._store.changed:
            while True:
                self._check_open()
                partition, task = self._task(partition_id, task_name)
                ready = partition.ready(task, required_fields)
                lacking = len(task.open) - len(ready)
                unput = max(0, partition.declaration.num_samples - partition.put_total)
                if not blocking or len(ready) >= batch_size or lacking + unput == 0:
                    return self._claim(
                        partition, task_name, ready[:batch_size], list(required_fields)
                    )
                now = time.monotonic()
                if now >= deadline:
                    raise self._claim_timeout(
                        partition, task_name, required_fields, batch_size, timeout_s
                    )
                # A lease that runs out makes samples ready without anybody notifying.
                wake_at = min([deadline, *(lease.deadline for lease in partition.leases.values())])
                self._store.changed.wait(max(0.0, wake_at - now))

    def _claim(
        self, partition: Partition, task_name: str, claimed: list[str], required: list[str]
    ) -> KVBatchMeta:
        task = partition.tasks[task_name]
        extra_info: dict[str, Any] = {}
        if self._lease_s is not None and claimed:
            token = uuid.uuid4().hex
            extra_info[LEASE] = token
            partition.leases[token] = Lease(
                task_name, list(claimed), time.monotonic() + self._lease_s
            )
            task.leased.update(dict.fromkeys(claimed, token))
        else:
            task.settled.update(claimed)
        for sample_id in claimed:
            del task.open[sample_id]
        tags = [dict(partition.tags.get(sample_id, {})) for sample_id in claimed]
        return KVBatchMeta(
            partition_id=partition.declaration.partition_id,
            task_name=task_name,
            sample_ids=claimed,
            fields=required,
            sequence_lengths=tagged_lengths(tags),
            extra_info=extra_info,
            tags=tags if any(tags) else None,
        )

    def _claim_timeout(
        self,
        partition: Partition,
        task_name: str,
        required: list[str],
        batch_size: int,
        timeout_s: float,
    ) -> ClaimTimeoutError:
        task = partition.tasks[task_name]
        ready = len(partition.ready(task, required))
        lacking = {
            name: count
            for name in required
            if (count := sum(name not in partition.rows[sample_id] for sample_id in task.open))
        }
        return partition.declaration.claim_timeout(
            task_name,
            ready=ready,
            present=len(task.open),
            leased=len(task.leased),
            unput=max(0, partition.declaration.num_samples - partition.put_total),
            lacking=lacking,
            batch_size=batch_size,
            timeout_s=timeout_s,
        )

    def check_consumption_status(self, partition_id: str, task_names: list[str]) -> bool:
        with self._store.changed:
            self._check_open()
            partition = self._store.partitions.get(partition_id)
            if partition is None or not partition.rows:
                return False
            partition.expire_leases(time.monotonic())
            return all(
                name in partition.tasks and not partition.tasks[name].open for name in task_names
            )

    def clear_samples(
        self, sample_ids: list[str] | None, partition_id: str, *, force: bool = False
    ) -> None:
        with self._store.changed:
            self._check_open()
            partition = self._store.partitions.get(partition_id)
            if partition is not None:
                partition.expire_leases(time.monotonic())
                self._refuse_leased(partition, sample_ids, force=force)
            if sample_ids is None:
                if partition is None or not partition.rows:
                    warnings.warn(
                        f"clear_samples(None, partition={partition_id!r}): nothing to clear",
                        RuntimeWarning,
                        stacklevel=2,
                    )
                self._store.partitions.pop(partition_id, None)
            elif partition is not None:
                for sample_id in sample_ids:
                    partition.drop(sample_id)
            self._store.changed.notify_all()

    @staticmethod
    def _refuse_leased(partition: Partition, sample_ids: list[str] | None, *, force: bool) -> None:
        if force:
            return
        asked = partition.rows.keys() if sample_ids is None else sample_ids
        held = {
            sample_id: name
            for name, task in partition.tasks.items()
            if task.leased
            for sample_id in asked
            if sample_id in task.leased
        }
        if held:
            raise SamplesLeasedError(
                f"clear_samples(partition={partition.declaration.partition_id!r}): {len(held)} "
                f"samples are leased by {listed(sorted(set(held.values())))}: {listed(held)}; "
                "acknowledge or release them first, or clear with force=True"
            )

    def acknowledge(self, meta: KVBatchMeta) -> None:
        self._settle(meta, lambda partition, token: partition.end_lease(token, settle=True))

    def release(self, meta: KVBatchMeta) -> None:
        self._settle(meta, lambda partition, token: partition.end_lease(token, settle=False))

    def renew(self, meta: KVBatchMeta) -> None:
        def extend(partition: Partition, token: str) -> None:
            partition.leases[token].deadline = time.monotonic() + (self._lease_s or 0.0)

        self._settle(meta, extend)

    def _settle(self, meta: KVBatchMeta, change: Callable[[Partition, str], None]) -> None:
        if not meta.sample_ids:
            return
        token = meta.extra_info.get(LEASE)
        if self._lease_s is None or token is None:
            raise InvalidRequestError(
                f"claim of {meta.size} samples of partition {meta.partition_id!r} carries no "
                "lease; set claim_lease_s in the data-plane config before claiming"
            )
        with self._store.changed:
            self._check_open()
            partition = self._partition(meta.partition_id)
            if token not in partition.leases:
                raise LeaseLostError(
                    f"lease of task {meta.task_name!r} on {meta.size} samples of partition "
                    f"{meta.partition_id!r} ran out or was ended; another claim may hold them"
                )
            change(partition, token)
            self._store.changed.notify_all()

    def count_samples(
        self, partition_id: str, task_name: str, required_fields: list[str]
    ) -> TaskCounts:
        with self._store.changed:
            self._check_open()
            partition, task = self._task(partition_id, task_name)
            ready = len(partition.ready(task, required_fields))
            return TaskCounts(
                put=partition.put_total,
                ready=ready,
                not_ready=len(task.open) - ready,
                leased=len(task.leased),
                acknowledged=len(task.settled),
                cleared=partition.put_total - len(partition.rows),
            )

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with self._store.changed:
            if self._owner:
                self._store.closed = True
                self._store.partitions.clear()
            self._store.changed.notify_all()

    def _check_open(self) -> None:
        if self._closed or self._store.closed:
            raise ClosedError("the in_memory client was closed; build a new one")

    def _partition(self, partition_id: str) -> Partition:
        partition = self._store.partitions.get(partition_id)
        if partition is None:
            raise PartitionNotFoundError(
                f"partition {partition_id!r} is not registered; registered: "
                f"{listed(sorted(self._store.partitions)) or 'none'}"
            )
        partition.expire_leases(time.monotonic())
        return partition

    def _task(self, partition_id: str, task_name: str) -> tuple[Partition, Task]:
        partition = self._partition(partition_id)
        task = partition.tasks.get(task_name)
        if task is None:
            raise UnknownTaskError(
                f"partition {partition_id!r} has no task {task_name!r}; registered tasks: "
                f"{listed(partition.tasks) or 'none'}"
            )
        return partition, task


def _own(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
