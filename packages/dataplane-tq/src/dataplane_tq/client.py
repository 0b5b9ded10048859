"""`TQDataPlaneClient`: the data-plane contract on TransferQueue.

Every operation asks the directory first, which decides it: what may be put and where, what is
readable, who gets which sample. Values then move between this process and the store, and
TransferQueue's controller learns of the rows, if need be afterwards. An operation owns one
connection to the directory; if it fails half-way, or its process dies, the connection ends and the
directory undoes it.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, TypeVar  # Any: tags and Ray handles

import ray
from tensordict import TensorDict

from dataplane_core import (
    Capabilities,
    ClosedError,
    DataPlaneConfig,
    DataPlaneError,
    KVBatchMeta,
    TagFilter,
    UnavailableError,
    validate_config,
)
from dataplane_core.boundary import (
    PutRequest,
    ReadRequest,
    check_claim,
    check_clear,
    check_put,
    check_read,
    check_settle,
    fields_to_read,
)
from dataplane_core.client import LEASE
from dataplane_core.columns import Column as PaddedColumn
from dataplane_core.columns import (
    check_columns,
    check_padding,
    fields_of_columns,
)
from dataplane_core.config import REQUIRED_OF_STORES, require_keys
from dataplane_core.declaration import (
    PartitionDeclaration,
    check_enums,
    tagged_lengths,
)
from dataplane_core.process import process_name
from dataplane_core.rows import Column, split_rows
from dataplane_core.schema import Form
from dataplane_core.telemetry import detail_span
from dataplane_tq import protocol as p
from dataplane_tq import topology, transfer_queue_rows
from dataplane_tq.engine import Engine
from dataplane_tq.entries import Entries
from dataplane_tq.onlooker import Onlooker
from dataplane_tq.stores import Encoded, PackedStore, Store, TransferQueueStore
from dataplane_tq.wire import Link

T = TypeVar("T")

_DEFAULT_TIMEOUT_MS = 30_000
_FLUSH_S = 5.0
_CLAIM_ANSWER_S = 5.0
"""How long past its own deadline a claim's answer may take; not less than a busy directory needs,
since a claim without a lease that was granted and not received is lost."""


class TQDataPlaneClient(Onlooker):
    """A data plane on TransferQueue, over the Ray cluster this process is connected to.

    Args:
        cfg: see `DataPlaneConfig`; ``backend`` names the storage. ``ack_timeout_ms`` is the
            deadline of each operation (30 s if not set).
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
        leases=True,
        conservation=True,
        safe_clear=True,
        backpressure=True,
        survivable=True,
        group_claims=True,
        origins=True,
        inspection=True,
        withdrawal=True,
    )

    def __init__(self, cfg: DataPlaneConfig | Mapping[str, Any], *, bootstrap: bool = True) -> None:
        valid = validate_config(cfg)
        require_keys(valid, REQUIRED_OF_STORES, impl="transfer_queue")
        self._timeout_s = valid.get("ack_timeout_ms", _DEFAULT_TIMEOUT_MS) / 1000
        self._lease_s = valid.get("claim_lease_s")
        self._closed = False
        self._pid = os.getpid()
        self._owned = topology.bootstrap(valid) if bootstrap else None
        try:
            found = self._owned or topology.attach(self._timeout_s)
            self._link = Link(found.connection.directory, timeout_s=self._timeout_s)
            self._engine = Engine(found.connection, found.actors, timeout_s=self._timeout_s)
        except DataPlaneError:
            if self._owned is not None:
                self._owned.stop()
            raise
        self.capabilities = replace(  # type: ignore[misc]  # it depends on the backend
            type(self).capabilities, survivable=found.connection.survivable
        )
        self._entries = Entries(self._engine, self._link)
        self._node = ray.get_runtime_context().get_node_id()
        self._store: Store = (
            PackedStore(found.connection.storage, self._timeout_s)
            if found.connection.backend == "packed"
            else TransferQueueStore(self._engine, rows_as_bytes=found.connection.rows_as_bytes)
        )
        directory = found.connection.directory
        self._store_key = (directory.host, directory.port)

    @property
    def store_key(self) -> Hashable:
        return self._store_key

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
        self._ask(f"register_partition({partition_id!r})", p.Register(declaration), type(None))

    def put_samples(
        self,
        sample_ids: list[str],
        partition_id: str,
        fields: TensorDict | None = None,
        tags: list[dict[str, Any]] | None = None,
        *,
        claim: KVBatchMeta | None = None,
        origin: str | None = None,
    ) -> KVBatchMeta:
        self._check_open()
        put = check_put("put_samples", sample_ids, partition_id, tags, claim=claim, origin=origin)
        if fields is None:
            return self._put(put, Encoded({}), dict)
        count = len(put.sample_ids)
        encoded = self._store.encode(fields, count)

        def rows() -> dict[str, Column]:
            return split_rows(fields, count)

        return self._put(put, encoded, rows)

    def put_columns(
        self,
        sample_ids: list[str],
        partition_id: str,
        columns: Mapping[str, PaddedColumn],
        tags: list[dict[str, Any]] | None = None,
        *,
        lengths: Sequence[int] | None = None,
        ragged: Collection[str] = (),
        claim: KVBatchMeta | None = None,
        origin: str | None = None,
    ) -> KVBatchMeta:
        self._check_open()
        put = check_put("put_columns", sample_ids, partition_id, tags, claim=claim, origin=origin)
        count = len(put.sample_ids)
        cuts, cut = check_columns(put.where, columns, count, lengths, ragged)
        encoded = self._store.encode_columns(columns, count, cuts, cut)

        def rows() -> dict[str, Column]:
            return split_rows(fields_of_columns(columns, count), count)

        return self._put(put, encoded, rows)

    def _put(
        self, put: PutRequest, encoded: Encoded, rows: Callable[[], Mapping[str, Column]]
    ) -> KVBatchMeta:
        """Put what is encoded; ``rows`` gives its values one by one, for fields with enums."""
        what, sample_ids, partition_id = put.where, put.sample_ids, put.partition_id
        self._entries.make_room(what)
        with self._link.session(what) as session:
            where = session.ask(
                p.BeginPut(
                    partition_id,
                    sample_ids,
                    encoded.kinds,
                    encoded.layouts if sample_ids else [],
                    self._node,
                    put.token,
                    self._timeout_s,
                    encoded.forms,
                ),
                p.PutAnswer,
            )
            if where.enums:
                declared = PartitionDeclaration(partition_id, (), 0, (), enums=where.enums)
                check_enums(rows(), declared)
            if sample_ids:
                with detail_span("storage_write", "overhead"):
                    self._store.write(
                        what,
                        encoded,
                        where,
                        sample_ids,
                        partition_id,
                        put.tags,
                        lambda: session.ask(p.CheckPut(), type(None)),
                    )
            entering = bool(sample_ids) and not self._store.registers
            session.ask(p.CommitPut(put.tags, entering, put.origin), type(None))
            if entering:
                tell = partial(
                    transfer_queue_rows.enter,
                    self._engine.client,
                    list(sample_ids),  # those of the meta are the caller's to change
                    partition_id,
                    put.copied_tags(),
                    where.leftovers,
                    list(encoded.kinds),
                )
                self._entries.add(session, partition_id, tell)
        return KVBatchMeta(
            partition_id=partition_id,
            task_name=None,
            sample_ids=sample_ids,
            fields=list(encoded.kinds) or None,
            tags=put.copied_tags(),
        )

    def get_samples(
        self,
        sample_ids: list[str],
        partition_id: str,
        select_fields: list[str],
        *,
        origins: dict[str, int] | None = None,
    ) -> TensorDict:
        self._check_open()
        read = check_read("get_samples", sample_ids, partition_id, select_fields, origins=origins)
        with self._reading(read, origins) as where:
            if not read.sample_ids or not read.fields:
                return TensorDict({}, batch_size=[len(read.sample_ids)])
            with detail_span("storage_read", "overhead"):
                return self._store.read(
                    read.where, where, read.sample_ids, read.partition_id, read.fields
                )

    def get_columns(
        self,
        sample_ids: list[str],
        partition_id: str,
        select_fields: list[str],
        *,
        pad_values: Mapping[str, float] | None = None,
        width: int = 0,
        origins: dict[str, int] | None = None,
        forms: dict[str, Form] | None = None,
    ) -> dict[str, PaddedColumn]:
        self._check_open()
        read = check_read("get_columns", sample_ids, partition_id, select_fields, origins=origins)
        padding, width = check_padding(read.where, pad_values, width)
        with self._reading(read, origins) as where:
            if forms is not None:
                forms.update(where.forms)
            if not read.sample_ids or not read.fields:
                return {}
            with detail_span("storage_read", "overhead"):
                return self._store.read_columns(
                    read.where,
                    where,
                    read.sample_ids,
                    read.partition_id,
                    read.fields,
                    padding,
                    width,
                )

    @contextmanager
    def _reading(self, read: ReadRequest, origins: dict[str, int] | None) -> Iterator[p.ReadAnswer]:
        """Keep rows where they are until the block ends."""
        with self._link.session(read.where) as session:
            request = p.Read(read.partition_id, read.sample_ids, read.fields, origins is not None)
            where = session.ask(request, p.ReadAnswer)
            if origins is not None:
                origins.update(where.origins)
            yield where
            session.tell(p.Unpin())

    def get_data(
        self,
        meta: KVBatchMeta,
        select_fields: list[str] | None = None,
        *,
        origins: dict[str, int] | None = None,
    ) -> TensorDict:
        names = fields_to_read(meta, select_fields)
        return self.get_samples(meta.sample_ids, meta.partition_id, names, origins=origins)

    def claim_meta(
        self,
        partition_id: str,
        task_name: str,
        required_fields: list[str],
        batch_size: int,
        dp_rank: int | None = None,
        blocking: bool = True,
        timeout_s: float = 60.0,
        *,
        dp_world: int | None = None,
        where: Sequence[TagFilter] = (),
        seed: int | None = None,
        wait_for_leased: bool = True,
    ) -> KVBatchMeta:
        self._check_open()
        call = check_claim(
            partition_id,
            task_name,
            required_fields,
            batch_size,
            dp_rank,
            blocking,
            timeout_s,
            dp_world=dp_world,
            where=where,
            seed=seed,
            lease_s=self._lease_s,
            owner=process_name(),
            wait_for_leased=wait_for_leased,
        )
        request = call.request
        claimed = self._ask(
            call.where,
            p.Claim(call.partition_id, request, call.timeout_s),
            p.ClaimAnswer,
            call.timeout_s + min(self._timeout_s, _CLAIM_ANSWER_S),
        )
        self._entries.claimed(claimed.entered, call.partition_id, request.task_name)
        return KVBatchMeta(
            partition_id=call.partition_id,
            task_name=request.task_name,
            sample_ids=claimed.sample_ids,
            fields=list(request.required_fields),
            sequence_lengths=tagged_lengths(claimed.tags or []),
            extra_info={} if claimed.token is None else {LEASE: claimed.token},
            tags=claimed.tags,
        )

    def clear_samples(
        self, sample_ids: list[str] | None, partition_id: str, *, force: bool = False
    ) -> None:
        self._check_open()
        ids, partition_id, force = check_clear("clear_samples", sample_ids, partition_id, force)
        if ids is not None and not ids:
            return
        what = f"clear_samples(partition={partition_id!r})"
        dropped = self._clear(what, p.Clear(partition_id, ids, force, self._timeout_s))
        if ids is None and not dropped:
            warnings.warn(f"{what}: nothing to clear", RuntimeWarning, stacklevel=2)

    def withdraw_samples(self, sample_ids: list[str], partition_id: str) -> None:
        self._check_open()
        ids, partition_id, _ = check_clear("withdraw_samples", sample_ids, partition_id)
        if ids:
            what = f"withdraw_samples(partition={partition_id!r})"
            self._clear(what, p.Clear(partition_id, ids, True, self._timeout_s, withdrawn=True))

    def _clear(self, what: str, request: p.Clear) -> int:
        """How many samples were there."""
        client = self._engine.client
        with self._link.session(what) as session:
            answer = cleared = session.ask(request, p.ClearAnswer)
            while True:
                self._engine.run(
                    what, transfer_queue_rows.drop, client, request.partition_id, answer.leftovers
                )
                if not answer.more:
                    break
                answer = session.ask(p.NextLeftovers(), p.ClearAnswer)
            if request.sample_ids is None:
                self._engine.run(what, transfer_queue_rows.forget, client, request.partition_id)
            session.ask(p.Dropped(), type(None))
        return cleared.dropped

    def acknowledge(self, meta: KVBatchMeta) -> None:
        self._settle(meta, "acknowledge")

    def release(self, meta: KVBatchMeta) -> None:
        self._settle(meta, "release")

    def renew(self, meta: KVBatchMeta) -> None:
        self._settle(meta, "renew")

    def _settle(self, meta: KVBatchMeta, how: p.HowToSettle) -> None:
        self._check_open()
        claim = check_settle(how, meta)
        if claim.sample_ids:
            entered = self._ask(
                claim.where,
                p.Settle(claim.partition_id, claim.token, claim.sample_ids, how),
                list[str],
            )
            if claim.task_name is not None:
                self._entries.claimed(entered, claim.partition_id, claim.task_name)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def close(self) -> None:
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self._link.close()
        self._entries.flush(min(self._timeout_s, _FLUSH_S))
        self._store.close()
        self._engine.close()
        if self._owned is not None:
            self._owned.stop()

    def _ask(
        self, what: str, request: p.Request, answer: type[T], timeout_s: float | None = None
    ) -> T:
        return self._link.ask(what, request, answer, timeout_s)

    def _look(self, what: str, request: p.Request, answer: type[T]) -> T:
        self._check_open()
        return self._ask(what, request, answer)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the TransferQueue client was closed; build a new one")
        if os.getpid() != self._pid:
            raise UnavailableError(
                f"the TransferQueue client belongs to process {self._pid}, of which this is a "
                "fork; Ray and its connections do not survive that, so start a process instead"
            )
