"""`TQDataPlaneClient`: the data-plane contract on TransferQueue.

The directory decides every operation: what may be put and where, what is readable, and which
consumer gets which sample. Values then move between this process and the store. Unless the mirror
is off, the rows are reported to TransferQueue's controller. An operation owns one connection to the
directory. If it fails half-way, or its process dies, the connection closes and the directory undoes
the operation.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, TypeVar  # Any: tags and Ray handles

import ray
from tensordict import TensorDict

from dataplane_core import (
    ClosedError,
    DataPlaneConfig,
    KVBatchMeta,
    UnavailableError,
    validate_config,
)
from dataplane_core.boundary import (
    ClaimCall,
    LeaseCall,
    PutRequest,
    ReadRequest,
    check_put,
    check_read,
)
from dataplane_core.checked_client import LedgerClient
from dataplane_core.config import REQUIRED_OF_STORES, check_agreement, require_keys
from dataplane_core.declaration import PartitionDeclaration, check_enums
from dataplane_core.schema import Form
from dataplane_core.telemetry import detail_span
from dataplane_core.tensors.columns import Column as PaddedColumn
from dataplane_core.tensors.columns import (
    check_columns,
    check_padding,
    fields_of_columns,
)
from dataplane_core.tensors.rows import Column, split_rows
from dataplane_tq import topology
from dataplane_tq.directory import protocol as p
from dataplane_tq.directory.wire import Link
from dataplane_tq.inspector import DirectoryInspector
from dataplane_tq.mirror import rows as mirror_rows
from dataplane_tq.mirror.engine import Engine
from dataplane_tq.mirror.reporter import Reporter
from dataplane_tq.storage import BACKENDS
from dataplane_tq.value_stores import Encoded, PackedStore, Store, TransferQueueStore

T = TypeVar("T")

_DEFAULT_TIMEOUT_MS = 30_000
_CLAIM_ANSWER_S = 5.0
"""Time for a claim's answer after the claim's own deadline, in seconds.

It must suffice for a busy directory: if the answer to a claim without a lease is lost, no consumer
processes its samples.
"""


class TQDataPlaneClient(LedgerClient):
    """Client of a data plane on TransferQueue, over the Ray cluster of this process.

    Args:
        cfg: see `DataPlaneConfig`; ``backend`` names the storage. ``ack_timeout_ms`` is the
            deadline of each request (default 30 s); a put or clear makes several requests.
        bootstrap: True starts TransferQueue, and `close` stops it. False attaches to the running
            one and leaves it running; then ``cfg`` needs no key that the store determines.

    Raises:
        ConfigError: (a ValueError) the configuration is wrong or contradicts the running store's,
            or TransferQueue already runs.
        UnavailableError: Ray is not initialized, or there is nothing to attach to.
    """

    def __init__(self, cfg: DataPlaneConfig | Mapping[str, Any], *, bootstrap: bool = True) -> None:
        valid = validate_config(cfg)
        if bootstrap:
            require_keys(valid, REQUIRED_OF_STORES, impl="transfer_queue")
        self._timeout_s = valid.get("ack_timeout_ms", _DEFAULT_TIMEOUT_MS) / 1000
        self._lease_s = valid.get("claim_lease_s")
        self._closed = False
        self._pid = os.getpid()
        with ExitStack() as opened:  # if a step fails, the caller gets no client to close
            if bootstrap:
                running = topology.bootstrap(valid)
                opened.callback(running.stop)
            else:
                running = topology.attach(self._timeout_s)
                check_agreement(valid, running.connection.settings)
            connection = running.connection
            self._node = ray.get_runtime_context().get_node_id()
            self._engine = self._connect_engine(running)
            if self._engine is not None:
                opened.callback(self._engine.close)
            self._store = self._store_of(connection)
            opened.callback(self._store.close)
            self._link = Link(connection.directory, timeout_s=self._timeout_s)
            self._reporter = None if self._engine is None else Reporter(self._engine, self._link)
            if self._reporter is not None:
                opened.callback(self._reporter.flush)
            opened.callback(self._link.close)
            self.capabilities = replace(  # type: ignore[misc]  # it depends on the backend
                type(self).capabilities, survivable=BACKENDS[connection.backend].survivable
            )
            self._store_key = connection.directory.host, connection.directory.port
            self._opened = opened.pop_all()

    def _connect_engine(self, running: topology.Topology) -> Engine | None:
        """Connect to TransferQueue's controller; return None if the mirror is off."""
        connection, timeout_s = running.connection, self._timeout_s
        if connection.controller is None:
            return None
        backend = BACKENDS[connection.backend]
        return Engine(
            connection.controller,
            backend.manager,
            backend.bounded(connection.storage, timeout_s),
            running.actors,
            timeout_s=timeout_s,
        )

    def _store_of(self, connection: topology.ConnectionData) -> Store:
        if connection.backend == "packed":
            return PackedStore(connection.storage, self._timeout_s)
        assert self._engine is not None  # `topology.bootstrap` ensures it
        rows_as_bytes = BACKENDS[connection.backend].rows_as_bytes
        return TransferQueueStore(self._engine, rows_as_bytes=rows_as_bytes)

    @property
    def store_key(self) -> Hashable:
        return self._store_key

    @property
    def inspector(self) -> DirectoryInspector:
        return DirectoryInspector(self._ask_open, self.clear_samples)

    def _register_checked(self, declaration: PartitionDeclaration) -> None:
        what = f"register_partition({declaration.partition_id!r})"
        self._ask_open(what, p.Register(declaration), type(None))

    def _put_checked(self, put: PutRequest, fields: TensorDict | None) -> Sequence[str]:
        self._check_open()
        if fields is None:
            return self._put_encoded(put, Encoded({}), dict)
        count = len(put.sample_ids)
        encoded = self._store.encode(fields, count)

        def rows() -> dict[str, Column]:
            return split_rows(fields, count)

        return self._put_encoded(put, encoded, rows)

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
        acknowledge: bool = False,
    ) -> KVBatchMeta:
        self._check_open()
        put = check_put(
            "put_columns",
            sample_ids,
            partition_id,
            tags,
            claim=claim,
            origin=origin,
            acknowledge=acknowledge,
        )
        count = len(put.sample_ids)
        row_lengths, cut_columns = check_columns(put.operation, columns, count, lengths, ragged)
        encoded = self._store.encode_columns(columns, count, row_lengths, cut_columns)

        def rows() -> dict[str, Column]:
            return split_rows(fields_of_columns(columns, count), count)

        return put.result(self._put_encoded(put, encoded, rows))

    def _put_encoded(
        self, put: PutRequest, encoded: Encoded, rows: Callable[[], Mapping[str, Column]]
    ) -> list[str]:
        """Put encoded values; return the names of the fields.

        ``rows`` returns the values row by row, to check fields with enums.
        """
        what, sample_ids, partition_id = put.operation, put.sample_ids, put.partition_id
        fields = list(encoded.kinds)
        if self._reporter is not None:
            self._reporter.wait_for_turn(what)
        with self._link.session(what) as session:
            answer = session.ask(
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
            if answer.enums:
                declared = PartitionDeclaration(partition_id, (), 0, (), enums=answer.enums)
                check_enums(rows(), declared)
            if sample_ids:
                with detail_span("storage_write", "overhead"):
                    self._store.write(
                        put, encoded, answer, lambda: session.ask(p.CheckPut(), type(None))
                    )
            # A store with `reports_rows` has reported the rows during the write.
            reporter = None if self._store.reports_rows or not sample_ids else self._reporter
            commit = p.CommitPut(put.tags, reporter is not None, put.origin, put.acknowledge)
            if put.acknowledge:
                for each in session.ask(commit, list[p.Consumption]):
                    if self._reporter is not None:
                        self._reporter.report_claim(each.sample_ids, partition_id, each.task_name)
            else:
                session.ask(commit, type(None))
            if reporter is not None:
                tags = put.tags  # the result has copies
                reporter.report_put(session, partition_id, sample_ids, tags, answer.orphans, fields)
        return fields

    def _get_checked(self, read: ReadRequest, origins: dict[str, int] | None) -> TensorDict:
        self._check_open()
        with self._reading(read, origins) as answer:
            if not read.sample_ids or not read.fields:
                return TensorDict({}, batch_size=[len(read.sample_ids)])
            with detail_span("storage_read", "overhead"):
                return self._store.read(read, answer)

    def get_columns(
        self,
        sample_ids: list[str],
        partition_id: str,
        select_fields: list[str],
        *,
        pad_values: Mapping[str, float] | None = None,
        width: int = 0,
        lengths: Sequence[int] | None = None,  # this store records forms
        origins: dict[str, int] | None = None,
        forms: dict[str, Form] | None = None,
    ) -> dict[str, PaddedColumn]:
        self._check_open()
        read = check_read("get_columns", sample_ids, partition_id, select_fields, origins=origins)
        padding, width = check_padding(read.operation, pad_values, width)
        with self._reading(read, origins) as answer:
            if forms is not None:
                forms.update(answer.forms)
            if not read.sample_ids or not read.fields:
                return {}
            with detail_span("storage_read", "overhead"):
                return self._store.read_columns(read, answer, padding, width)

    @contextmanager
    def _reading(self, read: ReadRequest, origins: dict[str, int] | None) -> Iterator[p.ReadAnswer]:
        """Pin the rows of a read until the block ends; yield their locations."""
        with self._link.session(read.operation) as session:
            request = p.Read(read.partition_id, read.sample_ids, read.fields, origins is not None)
            answer = session.ask(request, p.ReadAnswer)
            if origins is not None:
                origins.update(answer.origins)
            yield answer
            session.send(p.Unpin())

    def _claim_checked(self, call: ClaimCall) -> KVBatchMeta:
        self._check_open()
        request = call.request
        claimed = self._link.ask(
            call.operation,
            p.Claim(call.partition_id, request, call.timeout_s),
            p.ClaimAnswer,
            call.timeout_s + min(self._timeout_s, _CLAIM_ANSWER_S),
        )
        if self._reporter is not None:
            self._reporter.report_claim(claimed.mirrored_ids, call.partition_id, request.task_name)
        return call.result(claimed.sample_ids, claimed.tags or [], claimed.token)

    def _clear_checked(
        self, partition_id: str, ids: list[str] | None, *, force: bool, withdrawn: bool = False
    ) -> bool:
        """Clear in the directory, then in TransferQueue."""
        self._check_open()
        if ids is not None and not ids:
            return False
        method = "withdraw_samples" if withdrawn else "clear_samples"
        what, engine = f"{method}(partition={partition_id!r})", self._engine
        request = p.Clear(partition_id, ids, force, self._timeout_s, withdrawn)
        with self._link.session(what) as session:
            answer = cleared = session.ask(request, p.ClearAnswer)
            while True:
                if engine is not None:
                    engine.run(what, mirror_rows.drop, engine.client, partition_id, answer.orphans)
                if not answer.more:
                    break
                answer = session.ask(p.NextOrphans(), p.ClearAnswer)
            if engine is not None and ids is None:
                engine.run(what, mirror_rows.forget, engine.client, partition_id)
            session.ask(p.Dropped(), type(None))
        return bool(cleared.dropped)

    def _consumed_checked(self, partition_id: str, task_names: list[str]) -> bool:
        what = f"check_consumption_status(partition={partition_id!r})"
        return self._ask_open(what, p.Consumed(partition_id, task_names), bool)

    def _origins_checked(self, read: ReadRequest) -> dict[str, int]:
        request = p.ReadOrigins(read.partition_id, read.sample_ids, read.fields)
        return self._ask_open(read.operation, request, dict[str, int])

    def _update_lease_checked(self, call: LeaseCall) -> None:
        request = p.UpdateLease(
            call.partition_id, call.token, call.sample_ids, call.action, call.task_name
        )
        mirrored = self._ask_open(call.operation, request, list[str])
        if self._reporter is not None and call.task_name is not None:
            self._reporter.report_claim(mirrored, call.partition_id, call.task_name)

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return self._closed

    def close(self) -> None:
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self._opened.close()

    def _ask_open(self, what: str, request: p.Request, answer: type[T]) -> T:
        self._check_open()
        return self._link.ask(what, request, answer)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the TransferQueue client was closed; build a new one")
        if os.getpid() != self._pid:
            raise UnavailableError(
                f"the TransferQueue client belongs to process {self._pid}, and this process is a "
                "fork of it; Ray does not survive a fork, so spawn a process instead"
            )
