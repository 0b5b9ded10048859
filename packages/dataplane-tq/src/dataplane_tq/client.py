"""`TQDataPlaneClient`: the data-plane contract on TransferQueue.

TransferQueue stores rows, tracks which field of which row was produced, and which task consumed it.
This adapter adds what the contract promises beyond that: refusals before anything is stored (from
the partition directory), answers that are never shortened and never another sample's row, partial
and blocking claims, and a deadline on every call.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar  # Any: tags and Ray handles

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from dataplane_core import (
    Capabilities,
    ClosedError,
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
    tagged_lengths,
)
from dataplane_core.rows import OBJECT, Column, collate, split_rows
from dataplane_tq import topology
from dataplane_tq.directory import ClaimView
from dataplane_tq.engine import Engine
from dataplane_tq.object_codec import decode_object, encode_object

_DEFAULT_TIMEOUT_MS = 30_000
_SAMPLE_ID = "__sample_id__"
"""Tag that carries a row's id, so that a claim learns ids and tags in the one request it is."""


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

    capabilities: ClassVar[Capabilities] = Capabilities(backpressure=True)

    def __init__(self, cfg: DataPlaneConfig | Mapping[str, Any], *, bootstrap: bool = True) -> None:
        valid = validate_config(cfg)
        require_keys(valid, REQUIRED_OF_STORES, impl="transfer_queue")
        if "claim_lease_s" in valid:
            raise InvalidRequestError(
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
            tags=tags,
        )
        data = None if fields is None else _stored_form(fields, columns, len(sample_ids))
        what = f"put_samples(partition={partition_id!r})"
        kinds = {name: column.kind for name, column in columns.items()}
        timeout_s = self._engine.timeout_s
        new_ids, declaration = self._engine.ask(
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
            check_enums(columns, declaration)
            self._store(what, sample_ids, partition_id, data, _stored_tags(meta, new_ids))
        except DataPlaneError:
            self._undo_put(partition_id, new_ids)
            raise
        self._engine.ask(what, self._directory.commit, partition_id)
        return meta

    def _store(
        self,
        what: str,
        sample_ids: list[str],
        partition_id: str,
        data: TensorDict | None,
        tags: list[dict[str, Any]],
    ) -> None:
        client = self._engine.client
        rows = self._engine.run(
            what, client.async_kv_retrieve_meta, sample_ids, partition_id, create=True
        )
        # Tags go first: a row may be claimed as soon as its data is known, and needs its id then.
        tagged = [i for i, tag in enumerate(tags) if tag]
        if tagged:
            changed = rows.select_samples(tagged)
            changed.clear_custom_meta()
            changed.update_custom_meta([tags[i] for i in tagged])
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
        what = f"claim_meta(partition={partition_id!r}, task={task_name!r})"
        deadline = time.monotonic() + timeout_s
        while True:
            view: ClaimView = self._engine.ask(
                what, self._directory.claim_view, partition_id, task_name
            )
            claimed = self._try_claim(
                what, partition_id, task_name, required_fields, batch_size, blocking, view
            )
            if claimed is not None:
                return claimed
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise self._claim_timeout(
                    what, partition_id, task_name, required_fields, batch_size, timeout_s
                )
            turn = min(remaining, self._poll_s)
            self._engine.ask(
                what,
                self._directory.wait_for_change,
                partition_id,
                view.version,
                turn,
                timeout_s=turn + self._engine.timeout_s,
            )

    def _try_claim(
        self,
        what: str,
        partition_id: str,
        task_name: str,
        required_fields: list[str],
        batch_size: int,
        whole: bool,
        view: ClaimView,
    ) -> KVBatchMeta | None:
        """The claim, or None if it has to wait; ``whole`` as `ClaimSampler` has it."""
        client = self._engine.client
        config = {
            "task_name": task_name,
            "max_samples": batch_size,
            "whole": whole,
            "unput": view.unput,
        }
        rows = self._engine.run(
            what,
            client.async_get_meta,
            data_fields=list(required_fields),
            batch_size=0,
            partition_id=partition_id,
            mode="fetch",
            task_name=task_name,
            sampling_config=config,
        )
        if whole and not rows.size and not self._exhausted(what, partition_id, task_name, view):
            return None
        tags = [dict(tag) for tag in rows.custom_meta]
        sample_ids = [tag.pop(_SAMPLE_ID) for tag in tags]
        return KVBatchMeta(
            partition_id=partition_id,
            task_name=task_name,
            sample_ids=sample_ids,
            fields=list(required_fields),
            sequence_lengths=tagged_lengths(tags),
            tags=tags if any(tags) else None,
        )

    def _exhausted(self, what: str, partition_id: str, task_name: str, view: ClaimView) -> bool:
        """Whether an empty claim means that nothing is left and nothing more can come."""
        return view.unput == 0 and self._unclaimed(what, partition_id, task_name) == 0

    def _unclaimed(self, what: str, partition_id: str, task_name: str) -> int:
        client = self._engine.client
        _, consumed = self._engine.run(
            what, client.async_get_consumption_status, task_name, partition_id
        )
        return 0 if consumed is None else int((consumed == 0).sum())

    def _claim_timeout(
        self,
        what: str,
        partition_id: str,
        task_name: str,
        required_fields: Sequence[str],
        batch_size: int,
        timeout_s: float,
    ) -> DataPlaneError:
        client = self._engine.client
        view = self._engine.ask(what, self._directory.claim_view, partition_id, task_name)
        _, consumed = self._engine.run(
            what, client.async_get_consumption_status, task_name, partition_id
        )
        present = 0 if consumed is None else int((consumed == 0).sum())
        lacking: dict[str, int] = {}
        ready = torch.ones(present, dtype=torch.bool)
        for name in required_fields:
            produced = self._produced(what, partition_id, name)
            open_rows = (
                torch.zeros(present, dtype=torch.bool)
                if consumed is None or produced is None or len(produced) != len(consumed)
                else produced[consumed == 0]
            )
            if int((~open_rows).sum()):
                lacking[name] = int((~open_rows).sum())
            ready &= open_rows
        return self._declared(what, partition_id).claim_timeout(
            task_name,
            ready=int(ready.sum()),
            present=present,
            leased=0,
            unput=view.unput,
            lacking=lacking,
            batch_size=batch_size,
            timeout_s=timeout_s,
        )

    def _produced(self, what: str, partition_id: str, name: str) -> torch.Tensor | None:
        """For every present row, in index order, whether ``name`` is written."""
        client = self._engine.client
        _, produced = self._engine.run(
            what, client.async_get_production_status, [name], partition_id
        )
        return None if produced is None else (produced == 1).all(dim=1)

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
            if not held:
                warnings.warn(f"{what}: nothing to clear", RuntimeWarning, stacklevel=2)
                return
            client = self._engine.client
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
        """Find out, row by row, what a read lacks."""
        self._declared(what, partition_id)
        written: dict[str, list[str] | None] = {}
        for sample_id in dict.fromkeys(sample_ids):
            row = self._resolve(what, [sample_id], partition_id)
            written[sample_id] = list(row.field_names) if row.size else None
        return missing_data(partition_id, sample_ids, select_fields, written.__getitem__)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the TransferQueue client was closed; build a new one")


def _stored_tags(meta: KVBatchMeta, new_ids: Sequence[str]) -> list[dict[str, Any]]:
    """Per row what replaces its stored tags; an empty dict leaves them as they are."""
    new = set(new_ids)
    if meta.tags is None:
        return [{_SAMPLE_ID: name} if name in new else {} for name in meta.sample_ids]
    return [{**tag, _SAMPLE_ID: name} for tag, name in zip(meta.tags, meta.sample_ids, strict=True)]


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
