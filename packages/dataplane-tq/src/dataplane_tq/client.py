"""`TQDataPlaneClient`: the data-plane contract on TransferQueue.

TransferQueue stores rows, tracks which field of which row was produced, and which task consumed it.
This adapter adds what the contract promises beyond that: refusals before anything is stored (from
the partition directory), answers that are never shortened and never another sample's row, partial
and blocking claims, and a deadline on every call.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar  # Any: tags and Ray handles

from tensordict import NonTensorData, NonTensorStack, TensorDict

from dataplane_core import (
    Capabilities,
    ClosedError,
    ConfigError,
    DataPlaneClient,
    DataPlaneConfig,
    DataPlaneError,
    InvalidRequestError,
    KVBatchMeta,
    MissingDataError,
    UnavailableError,
    validate_config,
)
from dataplane_core.config import REQUIRED_OF_STORES, require_keys
from dataplane_core.declaration import (
    PartitionDeclaration,
    check_enums,
    check_put,
    fields_to_read,
    missing_data,
)
from dataplane_core.rows import OBJECT, Column, collate, split_rows
from dataplane_tq import topology
from dataplane_tq.claims import SAMPLE_ID, Claim
from dataplane_tq.engine import Engine
from dataplane_tq.object_codec import decode_object, encode_object

_DEFAULT_TIMEOUT_MS = 30_000


class TQDataPlaneClient(DataPlaneClient):
    """A data plane on TransferQueue, over the Ray cluster this process is connected to.

    Args:
        cfg: see `DataPlaneConfig`; ``backend`` is ``simple``. ``ack_timeout_ms`` is the deadline of
            each operation (30 s if not set). ``claim_meta_poll_interval_s`` bounds what a lost
            wake-up can cost a blocked claim.
        bootstrap: True starts TransferQueue, which then lives as long as this client; False
            attaches to the one that runs, and leaves it running.

    Raises:
        ConfigError: (a ValueError) on a wrong configuration or a second bootstrap.
        UnavailableError: Ray is not initialised, or there is nothing to attach to.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        read_your_writes=True,
        no_torn_rows=True,
        exclusive_claims=True,
        bounded_waits=True,
        backpressure=True,
    )

    def __init__(self, cfg: DataPlaneConfig | Mapping[str, Any], *, bootstrap: bool = True) -> None:
        valid = validate_config(cfg)
        require_keys(valid, REQUIRED_OF_STORES, impl="transfer_queue")
        if "claim_lease_s" in valid:
            raise ConfigError(
                "data-plane config: claim_lease_s: impl 'transfer_queue' has no leases; remove it"
            )
        timeout_s = valid.get("ack_timeout_ms", _DEFAULT_TIMEOUT_MS) / 1000
        self._poll_s = valid["claim_meta_poll_interval_s"]
        self._closed = False
        self._owned = topology.bootstrap(valid) if bootstrap else None
        found = self._owned or topology.attach(timeout_s)
        self._directory = found.directory
        try:
            self._engine = Engine(found.connection, found.actors, timeout_s=timeout_s)
        except DataPlaneError:
            if self._owned is not None:
                self._owned.stop()
            raise

    def register_partition(
        self,
        partition_id: str,
        fields: list[str],
        num_samples: int,
        consumer_tasks: list[str],
        grpo_group_size: int | None = None,
        enums: dict[str, list[str]] | None = None,
    ) -> None:
        self._check_open()
        declaration = PartitionDeclaration.checked(
            partition_id, fields, num_samples, consumer_tasks, grpo_group_size, enums
        )
        self._engine.ask(
            f"register_partition({partition_id!r})",
            self._directory.register,
            declaration,
        )

    def put_samples(
        self,
        sample_ids: list[str],
        partition_id: str,
        fields: TensorDict | None = None,
        tags: list[dict[str, Any]] | None = None,
    ) -> KVBatchMeta:
        self._check_open()
        check_put(sample_ids, partition_id, tags)
        columns = {} if fields is None else split_rows(fields, len(sample_ids))
        meta = KVBatchMeta(
            partition_id=partition_id,
            task_name=None,
            sample_ids=list(sample_ids),
            fields=list(columns) or None,
            tags=None if tags is None else [dict(tag) for tag in tags],
        )
        data = None if fields is None else _stored_form(fields, columns, len(sample_ids))
        what = f"put_samples(partition={partition_id!r})"
        kinds = {name: column.kind for name, column in columns.items()}
        timeout_s = self._engine.timeout_s
        if OBJECT in kinds.values():
            check_enums(columns, self._declared(what, partition_id))
        new_ids = self._engine.ask(
            what,
            self._directory.admit,
            partition_id,
            sample_ids,
            kinds,
            timeout_s,
            timeout_s=timeout_s + 5.0,
        )
        if not sample_ids:
            return meta
        try:
            self._store(what, sample_ids, partition_id, data, tags)
        except DataPlaneError:
            self._undo_put(partition_id, new_ids)
            raise
        self._engine.ask(what, self._directory.commit, partition_id, new_ids)
        return meta

    def _store(
        self,
        what: str,
        sample_ids: list[str],
        partition_id: str,
        data: TensorDict | None,
        tags: list[dict[str, Any]] | None,
    ) -> None:
        client = self._engine.client
        rows = self._engine.run(
            what, client.async_kv_retrieve_meta, sample_ids, partition_id, create=True
        )
        # Tags go first: a row may be claimed as soon as its data is known, and needs its id then.
        # Rows that are there already keep the tags they have, unless the put brings new ones.
        places = [
            i for i, tag in enumerate(rows.custom_meta) if tags is not None or SAMPLE_ID not in tag
        ]
        if places:
            changed = rows.select_samples(places)
            changed.clear_custom_meta()
            changed.update_custom_meta(
                [{**(tags[i] if tags else {}), SAMPLE_ID: sample_ids[i]} for i in places]
            )
            self._engine.run(what, client.async_set_custom_meta, changed)
        if data is None or not len(data.keys()):
            return
        self._engine.run(what, client.storage_manager.put_data, data, rows)
        # TransferQueue only logs when the controller did not learn of the data in time.
        stored = self._resolve(what, sample_ids, partition_id)
        unseen = set(data.keys()) - set(stored.field_names)
        if unseen:
            raise UnavailableError(
                f"{what}: the controller did not acknowledge fields {sorted(unseen)}"
            )

    def _undo_put(self, partition_id: str, new_ids: list[str]) -> None:
        """Take the new rows of a failed put away, as far as the store still answers."""
        what = f"undo of put_samples(partition={partition_id!r})"
        if not new_ids:
            return
        try:
            self._drop_rows(what, new_ids, partition_id)
            self._engine.ask(what, self._directory.retract, partition_id, new_ids)
        except DataPlaneError as error:
            warnings.warn(f"{what} failed: {error}", RuntimeWarning, stacklevel=3)

    def get_samples(
        self, sample_ids: list[str], partition_id: str, select_fields: list[str]
    ) -> TensorDict:
        self._check_open()
        what = f"get_samples(partition={partition_id!r})"
        distinct = list(dict.fromkeys(sample_ids))
        if not distinct:
            self._declared(what, partition_id)
            return collate({}, 0)
        rows = self._resolve(what, distinct, partition_id)
        if rows.size != len(distinct) or not set(select_fields) <= set(rows.field_names):
            raise self._missing(what, partition_id, sample_ids, select_fields)
        if not select_fields:
            return TensorDict({}, batch_size=[len(sample_ids)])
        wanted = rows.select_fields(list(dict.fromkeys(select_fields)))
        client = self._engine.client
        try:
            answer = self._engine.run(what, client.async_get_data, wanted)
        except UnavailableError:
            # A row that was cleared while it was being read fails in the storage unit.
            if self._resolve(what, distinct, partition_id).global_indexes != rows.global_indexes:
                raise self._missing(what, partition_id, sample_ids, select_fields) from None
            raise
        # TransferQueue holds no lease between resolving and reading: a row that was cleared
        # meanwhile may have been given to another sample.
        after = self._resolve(what, distinct, partition_id)
        if after.global_indexes != rows.global_indexes:
            raise self._missing(what, partition_id, sample_ids, select_fields)
        places = {sample_id: i for i, sample_id in enumerate(distinct)}
        order = [places[sample_id] for sample_id in sample_ids]
        columns = {
            name: _reordered(column, order)
            for name, column in split_rows(answer, len(distinct)).items()
        }
        return collate(columns, len(sample_ids))

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
        self._check_open()
        if batch_size < 1:
            raise InvalidRequestError(f"claim_meta: batch_size {batch_size}; expected at least 1")
        claim = Claim(
            self._engine,
            self._directory,
            partition_id,
            task_name,
            list(required_fields),
            batch_size,
        )
        return claim.run(blocking=blocking, timeout_s=timeout_s, poll_s=self._poll_s)

    def check_consumption_status(self, partition_id: str, task_names: list[str]) -> bool:
        self._check_open()
        what = f"check_consumption_status(partition={partition_id!r})"
        declaration = self._engine.ask(what, self._directory.declaration, partition_id)
        if declaration is None or not set(task_names) <= set(declaration.consumer_tasks):
            return False
        client = self._engine.client
        for task_name in task_names:
            _, consumed = self._engine.run(
                what, client.async_get_consumption_status, task_name, partition_id
            )
            if consumed is None or not consumed.numel() or not bool((consumed == 1).all()):
                return False
        return True

    def clear_samples(
        self, sample_ids: list[str] | None, partition_id: str, *, force: bool = False
    ) -> None:
        self._check_open()
        what = f"clear_samples(partition={partition_id!r})"
        if sample_ids is None:
            held = self._engine.ask(what, self._directory.forget, partition_id)
            client = self._engine.client
            if not held:
                warnings.warn(f"{what}: nothing to clear", RuntimeWarning, stacklevel=2)
                # TransferQueue takes a partition without rows for one that does not exist, and
                # would keep it in its list for ever.
                row = [SAMPLE_ID]
                self._engine.run(
                    what, client.async_kv_retrieve_meta, row, partition_id, create=True
                )
            self._engine.run(what, client.async_clear_partition, partition_id)
        elif sample_ids:
            asked = list(dict.fromkeys(sample_ids))
            self._drop_rows(what, asked, partition_id)
            self._engine.ask(what, self._directory.cleared, partition_id, asked)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._engine.close()
        if self._owned is not None:
            self._owned.stop()

    def _drop_rows(self, what: str, sample_ids: list[str], partition_id: str) -> None:
        rows = self._resolve(what, sample_ids, partition_id)
        if rows.size:
            client = self._engine.client
            self._engine.run(what, client.async_clear_samples, rows)

    def _resolve(self, what: str, sample_ids: list[str], partition_id: str) -> Any:
        """TransferQueue's meta of the rows that exist, with the fields that all of them have."""
        client = self._engine.client
        return self._engine.run(
            what, client.async_kv_retrieve_meta, sample_ids, partition_id, create=False
        )

    def _declared(self, what: str, partition_id: str) -> PartitionDeclaration:
        """The declaration, or the directory's `PartitionNotFoundError`."""
        self._engine.ask(what, self._directory.known_ids, partition_id, [])
        return self._engine.ask(what, self._directory.declaration, partition_id)

    def _missing(
        self,
        what: str,
        partition_id: str,
        sample_ids: Sequence[str],
        select_fields: Sequence[str],
    ) -> MissingDataError:
        """Find out what a read lacks, for every row it asked for."""
        known = self._engine.ask(
            what, self._directory.known_ids, partition_id, list(dict.fromkeys(sample_ids))
        )
        written: dict[str, list[str]] = {name: [] for name in known}
        if known:
            rows = self._resolve(what, known, partition_id)
            places = list(rows.global_indexes)
            if len(places) != len(known):  # cleared since the directory was asked
                known, written = [], {}
            for name in dict.fromkeys(select_fields):
                has = self._rows_with(what, partition_id, name)
                for sample_id, place in zip(known, places, strict=False):
                    if place in has:
                        written[sample_id].append(name)
        return missing_data(partition_id, sample_ids, select_fields, written.get)

    def _rows_with(self, what: str, partition_id: str, name: str) -> set[int]:
        """TransferQueue's numbers of the rows that have field ``name``."""
        client = self._engine.client
        places, produced = self._engine.run(
            what, client.async_get_production_status, [name], partition_id
        )
        if produced is None:
            return set()
        return set(places[(produced == 1).all(dim=1)].tolist())

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the TransferQueue client was closed; build a new one")


def _stored_form(fields: TensorDict, columns: Mapping[str, Column], count: int) -> TensorDict:
    """What is handed to TransferQueue: tensors on the CPU, Python values as bytes."""
    stored: dict[str, Any] = {}
    for name, column in columns.items():
        if column.kind == OBJECT:
            stored[name] = NonTensorStack(
                *(NonTensorData(encode_object(name, value)) for value in column.rows)
            )
        else:
            stored[name] = fields.get(name).detach().cpu()
    return TensorDict(stored, batch_size=[count])


def _reordered(column: Column, order: Sequence[int]) -> Column:
    rows = [column.rows[i] for i in order]
    if column.kind == OBJECT:
        return Column(OBJECT, [decode_object(value) for value in rows])
    return Column(column.kind, rows)
