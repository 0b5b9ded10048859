"""`KeyValueClient`: the contract on any store with transactions over keys and bytes.

For SQLite, LMDB, PostgreSQL or FoundationDB, an adapter implements `KeyValueClient.transaction` and
`DataPlaneClient.close`; this class implements the rest. Each partition, each sample, each value,
and each claim of a sample by a task is one record. Reads and puts access one key per sample and
field; a claim scans all samples of its partition.
"""

from __future__ import annotations

import json
import time
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Protocol,
)  # Any: tags hold the caller's own primitives

import msgspec

from dataplane_core import declaration as rules
from dataplane_core.boundary import ClaimCall, PutRequest, ReadRequest
from dataplane_core.capabilities import Capabilities
from dataplane_core.checked_client import CheckedClient
from dataplane_core.errors import (
    PartitionNotFoundError,
    UnknownTaskError,
    UnsupportedError,
    listed,
)
from dataplane_core.meta import KVBatchMeta
from dataplane_core.schema import Form
from dataplane_core.tensors.object_codec import decode_object, decode_struct, encode_object
from dataplane_core.tensors.rows import Column, collate, set_forms, split_rows

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["KeyValueClient", "KeyValueTransaction"]


class KeyValueTransaction(Protocol):
    """Reads and writes of one transaction."""

    def get(self, key: str) -> bytes | None:
        """Return the value of a key; None if it has none."""

    def set(self, key: str, value: bytes) -> None:
        """Set the value of a key, replacing an older one."""

    def delete(self, key: str) -> None:
        """Delete a key, if it exists."""

    def scan(self, prefix: str) -> Iterable[tuple[str, bytes]]:
        """Return every key that starts with ``prefix``, and its value, in any order."""


class _Field(msgspec.Struct):
    kind: str
    samples: int = 0
    form: Form | None = None


class _Partition(msgspec.Struct):
    declared: rules.PartitionDeclaration
    put: int = 0
    created: int = 0
    fields: dict[str, _Field] = {}


class _Sample(msgspec.Struct):
    number: int
    tags: dict[str, Any] = {}
    fields: list[str] = []


class KeyValueClient(CheckedClient):
    """Base class of data-plane clients on a transactional key-value store.

    Values are stored as bytes without pickle (`tensors.object_codec`). Each key is a JSON array in
    ASCII, so that names of partitions, samples and fields cannot collide. Claims have no leases:
    the samples of a consumer that crashes are lost for its task. A put refuses ``claim`` and
    ``origin``. A read refuses ``origins``. A claim refuses ``dp_world``, ``where``, ``seed`` and
    ``sample_ids``. ``force`` has no effect.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        read_your_writes=True, no_torn_rows=True, exclusive_claims=True, bounded_waits=True
    )
    poll_s: ClassVar[float] = 0.002
    """Seconds between two tries of a blocked claim, which other processes cannot wake."""

    @abstractmethod
    def transaction(self) -> AbstractContextManager[KeyValueTransaction]:
        """Return a transaction that is serialized with those of all processes.

        Its writes become visible together when the block ends, and not at all if it raises.

        Raises:
            DeadlineExceededError: (TimeoutError) the store did not begin the transaction in time.
            ClosedError: (RuntimeError) the client was closed.
        """

    def _register_checked(self, declaration: rules.PartitionDeclaration) -> None:
        partition_id = declaration.partition_id
        with self.transaction() as store:
            known = store.get(_key("partition", partition_id))
            record = _Partition(declaration) if known is None else decode_struct(known, _Partition)
            record.declared = declaration
            record.put = len(list(store.scan(_under("sample", partition_id))))
            _save(store, record, "partition", partition_id)
            # Tasks that are declared again keep their claims.
            for key, _ in list(store.scan(_under("claim", partition_id))):
                if json.loads(key)[2] not in declaration.consumer_tasks:
                    store.delete(key)

    def _put_checked(self, put: PutRequest, fields: TensorDict | None) -> Sequence[str]:
        _refuse("put_samples", claim=put.token, origin=put.origin)
        sample_ids, partition_id, tags = put.sample_ids, put.partition_id, put.tags
        columns = {} if fields is None else split_rows(fields, len(sample_ids))
        kinds = {name: column.kind for name, column in columns.items()}
        with self.transaction() as store:
            record = _partition(store, partition_id)
            known = {name: field.kind for name, field in record.fields.items() if field.samples}
            rules.check_kinds(kinds, known, partition_id=partition_id)
            rules.check_enums(columns, record.declared)
            record.fields |= {name: _Field(kind) for name, kind in kinds.items() - known.items()}
            for name, column in columns.items():
                record.fields[name].form = record.fields[name].form or column.form
            for row, sample_id in enumerate(sample_ids):
                sample = _sample(store, partition_id, sample_id)
                if sample is None:
                    sample = _Sample(record.created)
                    record.put, record.created = record.put + 1, record.created + 1
                if tags is not None:
                    sample.tags = tags[row]
                for name, column in columns.items():
                    value = encode_object(f"field {name!r}", column.rows[row])
                    store.set(_key("value", partition_id, sample_id, name), value)
                    if name not in sample.fields:
                        sample.fields.append(name)
                        record.fields[name].samples += 1
                _save(store, sample, "sample", partition_id, sample_id)
            _save(store, record, "partition", partition_id)
        return list(columns)

    def _get_checked(self, read: ReadRequest, origins: dict[str, int] | None) -> TensorDict:
        _refuse("get_samples", origins=origins)
        sample_ids, partition_id, select_fields = read.sample_ids, read.partition_id, read.fields
        with self.transaction() as store:
            record = _partition(store, partition_id)
            samples = {each: _sample(store, partition_id, each) for each in sample_ids}
            written = {
                each: sample.fields for each, sample in samples.items() if sample is not None
            }
            if len(written) < len(samples) or any(
                not {*select_fields} <= {*fields} for fields in written.values()
            ):
                raise rules.missing_data(partition_id, sample_ids, select_fields, written.get)
            values = {
                name: [store.get(_key("value", partition_id, each, name)) for each in sample_ids]
                for name in select_fields
            }
        columns = {
            name: Column(record.fields[name].kind, [decode_object(each or b"") for each in rows])
            for name, rows in values.items()
            if rows
        }
        forms = {name: own.form for name, own in record.fields.items() if own.form is not None}
        return set_forms(collate(columns, len(sample_ids)), forms)

    def _claim_checked(self, call: ClaimCall) -> KVBatchMeta:
        request = call.request
        _refuse(
            "claim_meta",
            dp_world=request.dp_world,
            where=request.where or None,
            seed=request.seed,
            sample_ids=request.sample_ids,
        )
        partition_id, task_name = call.partition_id, request.task_name
        required_fields, batch_size = request.required_fields, request.batch_size
        deadline = time.monotonic() + call.timeout_s
        while True:
            is_timed_out = time.monotonic() >= deadline
            with self.transaction() as store:
                record = _partition(store, partition_id)
                declared = record.declared
                if task_name not in declared.consumer_tasks:
                    raise UnknownTaskError(
                        f"partition {partition_id!r} has no task {task_name!r}; registered: "
                        f"{listed(declared.consumer_tasks)}"
                    )
                present = _unclaimed(store, partition_id, task_name)
                ready = [each for each in present if {*required_fields} <= {*each[1].fields}]
                not_put = max(0, declared.num_samples - record.put)
                is_remainder = not not_put and len(ready) == len(present)
                if len(ready) >= batch_size or is_remainder or not request.blocking:
                    taken = ready[:batch_size]
                    for sample_id, _ in taken:
                        store.set(_key("claim", partition_id, task_name, sample_id), b"")
                    break
            if is_timed_out:
                lacking = {
                    name: sum(name not in sample.fields for _, sample in present)
                    for name in required_fields
                }
                raise declared.claim_timeout(
                    task_name,
                    ready=len(ready),
                    present=len(present),
                    not_put=not_put,
                    lacking={name: count for name, count in lacking.items() if count},
                    batch_size=batch_size,
                    timeout_s=call.timeout_s,
                )
            time.sleep(self.poll_s)
        return call.result(
            [sample_id for sample_id, _ in taken], [sample.tags for _, sample in taken]
        )

    def _consumed_checked(self, partition_id: str, task_names: list[str]) -> bool:
        with self.transaction() as store:
            put = len(list(store.scan(_under("sample", partition_id))))
            claimed = [
                len(list(store.scan(_under("claim", partition_id, each)))) for each in task_names
            ]
        return put > 0 and all(count == put for count in claimed)

    def _clear_checked(self, partition_id: str, ids: list[str] | None, *, force: bool) -> bool:
        with self.transaction() as store:
            encoded = store.get(_key("partition", partition_id))
            if encoded is not None and ids is None:
                store.delete(_key("partition", partition_id))
                for record_type in ("sample", "value", "claim"):
                    for key, _ in list(store.scan(_under(record_type, partition_id))):
                        store.delete(key)
            elif encoded is not None:
                record = decode_struct(encoded, _Partition)
                for sample_id in ids or ():
                    _drop_sample(store, record, partition_id, sample_id)
                _save(store, record, "partition", partition_id)
        return encoded is not None


def _key(*parts: str) -> str:
    return json.dumps(parts)


def _under(*parts: str) -> str:
    """Return the prefix of all keys that begin with these parts and have more."""
    return json.dumps(parts)[:-1] + ", "


def _save(store: KeyValueTransaction, record: _Partition | _Sample, *parts: str) -> None:
    store.set(_key(*parts), encode_object(parts[0], record))


def _partition(store: KeyValueTransaction, partition_id: str) -> _Partition:
    encoded = store.get(_key("partition", partition_id))
    if encoded is None:
        raise PartitionNotFoundError(f"partition {partition_id!r} is not registered")
    return decode_struct(encoded, _Partition)


def _sample(store: KeyValueTransaction, partition_id: str, sample_id: str) -> _Sample | None:
    encoded = store.get(_key("sample", partition_id, sample_id))
    return None if encoded is None else decode_struct(encoded, _Sample)


def _unclaimed(
    store: KeyValueTransaction, partition_id: str, task_name: str
) -> list[tuple[str, _Sample]]:
    """Return ids and records of unclaimed samples, in the order of first puts."""
    claimed = {
        json.loads(key)[3] for key, _ in store.scan(_under("claim", partition_id, task_name))
    }
    unclaimed = [
        (sample_id, decode_struct(value, _Sample))
        for key, value in store.scan(_under("sample", partition_id))
        if (sample_id := json.loads(key)[2]) not in claimed
    ]
    return sorted(unclaimed, key=lambda each: each[1].number)


def _drop_sample(
    store: KeyValueTransaction, record: _Partition, partition_id: str, sample_id: str
) -> None:
    sample = _sample(store, partition_id, sample_id)
    if sample is None:
        return
    store.delete(_key("sample", partition_id, sample_id))
    for name in sample.fields:
        store.delete(_key("value", partition_id, sample_id, name))
        record.fields[name].samples -= 1
    for task in record.declared.consumer_tasks:
        store.delete(_key("claim", partition_id, task, sample_id))


def _refuse(method: str, **keywords: object) -> None:
    given = [name for name, value in keywords.items() if value is not None]
    if given:
        raise UnsupportedError(f"{method}: a key-value client does not support {listed(given)}")
