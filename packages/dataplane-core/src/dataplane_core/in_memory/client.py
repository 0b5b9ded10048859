"""`InMemoryDataPlaneClient`: the contract inside one process.

For notebooks and tests, and the reference for other clients. Its store is a `Ledger` whose cells
are the values, guarded by one condition variable. Every change notifies it, so that blocked claims
and puts wake on changes instead of polling.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any  # Any: rows

import torch

from dataplane_core.boundary import ClaimCall, LeaseCall, PutRequest, ReadRequest
from dataplane_core.checked_client import LedgerClient
from dataplane_core.config import DataPlaneConfig, check_agreement, validate_config
from dataplane_core.declaration import PartitionDeclaration, check_enums
from dataplane_core.errors import ClosedError, ConfigError
from dataplane_core.in_memory.inspector import InMemoryInspector
from dataplane_core.ledger import Ledger, PutTicket, Shortage, load_order
from dataplane_core.ledger.samples import count_origins
from dataplane_core.meta import KVBatchMeta
from dataplane_core.tensors import rows as row_codec
from dataplane_core.tensors.object_codec import decode_object, encode_object

if TYPE_CHECKING:
    from tensordict import TensorDict

    from dataplane_core.schema import Form

_DEFAULT_PUT_TIMEOUT_S = 60.0


class Store:
    """The store that the clients of one process share."""

    def __init__(self, capacity: int | None, order: str | None) -> None:
        self.ledger = Ledger(capacity, order=load_order(order), measure=_bytes_of)
        self.settings = {"storage_capacity": capacity, "claim_order": order}
        self.changed = threading.Condition()
        self.closed = False


_attachable: Store | None = None
_attachable_lock = threading.Lock()


class InMemoryDataPlaneClient(LedgerClient):
    """Client with the full contract, including leases and backpressure, inside one process.

    Args:
        cfg: uses ``storage_capacity`` (samples; default unlimited), ``ack_timeout_ms`` (how long a
            put waits for free capacity; default 60 s), ``claim_lease_s`` and ``claim_order``; it
            ignores the other keys. None means an unlimited store without leases.
        bootstrap: True creates a store, which closes with this client; False attaches to the
            newest store of this process.

    Raises:
        ConfigError: (a ValueError) the configuration is invalid; or, with ``bootstrap=False``,
            there is no open store, or ``cfg`` contradicts its ``storage_capacity`` or
            ``claim_order``.
    """

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
                self._store = _attachable = Store(
                    valid.get("storage_capacity"), valid.get("claim_order")
                )
            elif _attachable is None or _attachable.closed:
                raise ConfigError(
                    "in_memory client with bootstrap=False: no open store in this process; "
                    "build a client with bootstrap=True first"
                )
            else:
                check_agreement(valid, _attachable.settings)
                self._store = _attachable

    @property
    def store_key(self) -> Hashable:
        return self._store

    @property
    def inspector(self) -> InMemoryInspector:
        return InMemoryInspector(self._ledger, self.clear_samples)

    def _register_checked(self, declaration: PartitionDeclaration) -> None:
        with self._ledger(change=True) as ledger:
            ledger.register(declaration)

    def _put_checked(self, put: PutRequest, fields: TensorDict | None) -> Sequence[str]:
        columns = {} if fields is None else row_codec.split_rows(fields, len(put.sample_ids))
        kinds = {name: column.kind for name, column in columns.items()}
        forms = {name: column.form for name, column in columns.items() if column.form is not None}
        # Copy before taking the lock: copies take most of the time.
        cells = {name: _copied_cells(name, column) for name, column in columns.items()}
        nbytes = {
            name: _bytes_of(copies)
            for name, copies in cells.items()
            if kinds[name] != row_codec.OBJECT
        }
        deadline = time.monotonic() + self._put_timeout_s
        with self._store.changed:
            ticket = self._admit(put, kinds, forms, deadline)
            try:
                check_enums(columns, self._store.ledger.partition(put.partition_id).declaration)
                self._store.ledger.commit_put(ticket, cells, put.tags, put.origin, nbytes=nbytes)
                if put.acknowledge:
                    self._store.ledger.acknowledge_put(ticket)
            finally:
                self._store.ledger.abort_put(ticket)
            self._store.changed.notify_all()
        return list(columns)

    def _admit(
        self, put: PutRequest, kinds: dict[str, str], forms: dict[str, Form], deadline: float
    ) -> PutTicket:
        """Wait until the store has capacity for the new samples; return the put's ticket."""
        self._check_open()
        partition = self._store.ledger.partition(put.partition_id)
        while True:
            self._check_open()
            self._expire()
            self._store.ledger.check_registered(partition)
            ticket = self._store.ledger.begin_put(
                put.partition_id, put.sample_ids, kinds, put.token, forms
            )
            if ticket is not None:
                return ticket
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise self._store.ledger.capacity_error(put.partition_id, put.sample_ids)
            self._store.changed.wait(remaining)

    def _get_checked(self, read: ReadRequest, origins: dict[str, int] | None) -> TensorDict:
        with self._store.changed:
            self._check_open()
            partition = self._store.ledger.partition(read.partition_id)
            rows = partition.samples.lookup(read.sample_ids, read.fields)
            columns = {
                name: row_codec.Column(
                    partition.samples.kinds[name], [row.cells[name] for row in rows]
                )
                for name in read.fields
                if rows
            }
            forms = dict(partition.samples.forms)
            if origins is not None:
                origins.update(count_origins(rows, read.fields))
        # Stored values are never changed in place, so they are copied outside the lock.
        for column in columns.values():
            if column.kind == row_codec.OBJECT:
                column.rows[:] = map(decode_object, column.rows)
        return row_codec.set_forms(row_codec.collate(columns, len(read.sample_ids)), forms)

    def _claim_checked(self, call: ClaimCall) -> KVBatchMeta:
        request = call.request
        deadline = time.monotonic() + call.timeout_s
        with self._store.changed:
            while True:
                self._check_open()
                self._expire()
                partition = self._store.ledger.partition(call.partition_id)
                revision = partition.revision
                try:
                    claimed = partition.claim(request, time.monotonic())
                finally:
                    if partition.revision != revision:
                        self._store.changed.notify_all()
                if claimed is not None:
                    break
                now = time.monotonic()
                if now >= deadline:
                    raise Shortage(partition, request).error(call.timeout_s, now)
                # An expiring lease makes samples ready without a notification.
                expiry = partition.next_expiry()
                wake_at = deadline if expiry is None else min(deadline, expiry)
                self._store.changed.wait(max(0.0, wake_at - now))
            tags = [dict(row.tags) for row in claimed.rows]
        return call.result([row.sample_id for row in claimed.rows], tags, claimed.token)

    def _consumed_checked(self, partition_id: str, task_names: list[str]) -> bool:
        with self._ledger() as ledger:
            partition = ledger.partitions.get(partition_id)
            return partition is not None and partition.all_acknowledged(task_names)

    def _clear_checked(
        self, partition_id: str, ids: list[str] | None, *, force: bool, withdrawn: bool = False
    ) -> bool:
        with self._ledger(change=True) as ledger:
            return bool(ledger.clear(partition_id, ids, force=force, withdrawn=withdrawn))

    def _origins_checked(self, read: ReadRequest) -> dict[str, int]:
        with self._ledger() as ledger:
            return ledger.partition(read.partition_id).samples.origins(read.sample_ids, read.fields)

    def _update_lease_checked(self, call: LeaseCall) -> None:
        with self._ledger(change=True) as ledger:
            partition = ledger.partition(call.partition_id)
            if call.action == "renew":
                partition.renew(call.token, call.sample_ids, time.monotonic(), call.task_name)
            elif call.action == "acknowledge":
                partition.acknowledge(call.token, call.sample_ids, call.task_name)
            else:
                partition.release(call.token, call.sample_ids, call.task_name)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with self._store.changed:
            if self._owner:
                self._store.closed = True
                self._store.ledger.close()
            self._store.changed.notify_all()

    @contextmanager
    def _ledger(self, *, change: bool = False, expire: bool = True) -> Iterator[Ledger]:
        """Lock the ledger for this thread.

        Args:
            change: notify blocked claims and puts at the end, because the ledger was changed.
            expire: end expired leases first.
        """
        with self._store.changed:
            self._check_open()
            if expire:
                self._expire()
            yield self._store.ledger
            if change:
                self._store.changed.notify_all()

    def _check_open(self) -> None:
        if self._closed or self._store.closed:
            raise ClosedError("the in_memory client was closed; build a new one")

    def _expire(self) -> None:
        if self._store.ledger.expire(time.monotonic()):
            self._store.changed.notify_all()


def _copied_cells(name: str, column: row_codec.Column) -> list[Any]:
    """Return copies of the rows, as the cells that the store holds.

    Python values are encoded as in every other store, so that all clients return the same values.
    """
    if column.kind == row_codec.OBJECT:
        return [encode_object(f"field {name!r}", row) for row in column.rows]
    return [row.clone() for row in column.rows]


def _bytes_of(cells: Sequence[torch.Tensor]) -> int:
    return sum(cell.nbytes for cell in cells)
