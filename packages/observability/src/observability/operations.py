"""`ObservedClient`: a client that passes every call on and tells observers of it.

The whole contract is passed on here, once; what is made of an operation (events, spans, log
records, metrics) is an `Observer` each. Whatever an observer does, the operation's own answer or
error is what the caller gets.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal  # Any: tags and extra keywords are the caller's own

import structlog

from dataplane_core import (
    Capabilities,
    ClaimSummary,
    DataPlaneClient,
    DataPlaneError,
    KVBatchMeta,
    PartitionSummary,
    SampleState,
    ShareSummary,
    StatePage,
    StorageSummary,
    TaskCounts,
)
from dataplane_core.client import LEASE
from dataplane_core.documented_client import as_client

if TYPE_CHECKING:
    from tensordict import TensorDict

    from dataplane_core.columns import Column

Op = Literal[
    "register",
    "claim_meta",
    "get_data",
    "check_consumption_status",
    "put",
    "get",
    "clear",
    "close",
    "acknowledge",
    "release",
    "renew",
]

logger = structlog.get_logger("observability")


@dataclass(eq=False)
class Operation:
    """One call, while it is under way and after it.

    Attributes:
        op: which.
        partition_id: empty for close.
        n_keys: samples named; of a claim those it got, of register the declared ones.
        n_bytes: bytes of tensors put or read.
        sample_ids: the samples; of a claim those it got, None where a whole partition is meant.
        fields: put, read, required or declared.
        tasks: the claiming task, or the declared ones.
        put_bytes: field to bytes of what is put.
        tags: of a put, which an observer may replace; of a claim what it got.
        options: what else the caller asked for: ``batch_size`` and ``blocking`` of a claim;
            ``withdrawn`` of a clear that takes samples back.
        leased: whether a claim got its samples under a lease.
        extra: further keywords of a put or a read, to which observers may add.
        wall_s: how long it took, in seconds; 0 while it runs.
        error: what it raised.
    """

    op: Op
    partition_id: str
    n_keys: int = 0
    n_bytes: int = 0
    sample_ids: Sequence[str] | None = ()
    fields: Sequence[str] = ()
    tasks: Sequence[str] = ()
    put_bytes: Mapping[str, int] = field(default_factory=dict)
    tags: list[dict[str, Any]] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    leased: bool = False
    extra: dict[str, Any] = field(default_factory=dict)
    wall_s: float = 0.0
    error: BaseException | None = None
    _inner: DataPlaneClient | None = None
    _origins: dict[str, int] | None = None

    @property
    def inner(self) -> DataPlaneClient | None:
        """The client that does the work."""
        return self._inner

    @property
    def status(self) -> Literal["ok", "timeout", "error"]:
        """How it ended."""
        if self.error is None:
            return "ok"
        return "timeout" if isinstance(self.error, TimeoutError) else "error"

    def ask_origins(self) -> None:
        """Before a read: let its answer bring along what `origins` tells."""
        if self._inner is not None and self._inner.capabilities.origins:
            if self.extra.get("origins") is None:
                self.extra["origins"] = {}
            self._origins = self.extra["origins"]

    def origins(self) -> Mapping[str, int]:
        """Of a claim or a read that went well: which puts its fields come from, and of how many
        samples. Asked of the store at most once."""
        if self._origins is None:
            self._origins = {}
            if self._inner is not None and self.sample_ids and self._inner.capabilities.origins:
                with suppress(DataPlaneError):  # cleared meanwhile
                    self._origins = self._inner.read_origins(
                        self.sample_ids, self.partition_id, self.fields
                    )
        return self._origins


class Observer:
    """Told of every operation. Both methods run in the thread of the caller."""

    def begin(self, call: Operation) -> Any:
        """An operation begins; what this returns is handed to `end`."""

    def end(self, call: Operation, state: Any) -> None:
        """It has ended. Observers end in the reverse order of their beginning."""


class ObservedClient(DataPlaneClient):
    """A client that does what ``inner`` does and tells ``observers``.

    Every call is passed on as it came, with any further keyword that ``inner`` understands.

    Args:
        inner: the client that does the work; any object with the documented methods, see
            `dataplane_core.documented_client`.
        observers: told in this order.
    """

    def __init__(self, inner: DataPlaneClient, observers: Sequence[Observer]) -> None:
        self._given = inner
        self._inner = as_client(inner)
        self._observers = tuple(observers)
        self._failures = 0
        self._failures_lock = threading.Lock()

    @property
    def inner(self) -> DataPlaneClient:
        """The wrapped client."""
        return self._given

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]  # as the inner instance says
        """The promises of the wrapped client."""
        return self._inner.capabilities

    @property
    def store_key(self) -> Hashable:
        return self._inner.store_key

    @property
    def failures(self) -> int:
        """How often an observer raised."""
        return self._failures

    def register_partition(
        self,
        partition_id: str,
        fields: list[str],
        num_samples: int,
        consumer_tasks: list[str],
        grpo_group_size: int | None = None,
        enums: dict[str, list[str]] | None = None,
        **extra: Any,
    ) -> None:
        call = Operation(
            "register", partition_id, n_keys=num_samples, fields=fields, tasks=consumer_tasks
        )
        with self._observed(call):
            self._inner.register_partition(
                partition_id, fields, num_samples, consumer_tasks, grpo_group_size, enums, **extra
            )

    def claim_meta(
        self,
        partition_id: str,
        task_name: str,
        required_fields: list[str],
        batch_size: int,
        dp_rank: int | None = None,
        blocking: bool = True,
        timeout_s: float = 60.0,
        **extra: Any,
    ) -> KVBatchMeta:
        call = Operation(
            "claim_meta",
            partition_id,
            fields=required_fields,
            tasks=[task_name],
            options={"batch_size": batch_size, "blocking": blocking},
        )
        with self._observed(call):
            meta = self._inner.claim_meta(
                partition_id,
                task_name,
                required_fields,
                batch_size,
                dp_rank,
                blocking,
                timeout_s,
                **extra,
            )
            call.n_keys, call.sample_ids = len(meta.sample_ids), meta.sample_ids
            call.tags, call.leased = meta.tags, LEASE in meta.extra_info
        if call.tags is not meta.tags:
            meta.tags = call.tags
        return meta

    def get_data(
        self, meta: KVBatchMeta, select_fields: list[str] | None = None, **extra: Any
    ) -> TensorDict:
        call = Operation(
            "get_data",
            getattr(meta, "partition_id", ""),
            n_keys=_count(getattr(meta, "sample_ids", ())),
            sample_ids=getattr(meta, "sample_ids", ()),
            fields=(getattr(meta, "fields", ()) or ()) if select_fields is None else select_fields,
            extra=extra,
        )
        with self._observed(call):
            answer = self._inner.get_data(meta, select_fields, **call.extra)
            call.n_bytes = sum(_bytes_by_field(answer).values())
        return answer

    def check_consumption_status(
        self, partition_id: str, task_names: list[str], **extra: Any
    ) -> bool:
        with self._observed(Operation("check_consumption_status", partition_id, tasks=task_names)):
            return self._inner.check_consumption_status(partition_id, task_names, **extra)

    def put_samples(
        self,
        sample_ids: list[str],
        partition_id: str,
        fields: TensorDict | None = None,
        tags: list[dict[str, Any]] | None = None,
        **extra: Any,
    ) -> KVBatchMeta:
        return self._put(
            sample_ids,
            partition_id,
            _bytes_by_field(fields),
            tags,
            extra,
            lambda call: self._inner.put_samples(
                sample_ids, partition_id, fields, call.tags, **call.extra
            ),
        )

    def put_columns(
        self,
        sample_ids: list[str],
        partition_id: str,
        columns: Mapping[str, Column],
        tags: list[dict[str, Any]] | None = None,
        *,
        lengths: Sequence[int] | None = None,
        ragged: Collection[str] = (),
        **extra: Any,
    ) -> KVBatchMeta:
        return self._put(
            sample_ids,
            partition_id,
            _bytes_by_column(columns, lengths, ragged),
            tags,
            extra,
            lambda call: self._inner.put_columns(
                sample_ids,
                partition_id,
                columns,
                call.tags,
                lengths=lengths,
                ragged=ragged,
                **call.extra,
            ),
        )

    def _put(
        self,
        sample_ids: list[str],
        partition_id: str,
        put_bytes: dict[str, int],
        tags: list[dict[str, Any]] | None,
        extra: dict[str, Any],
        run: Callable[[Operation], KVBatchMeta],
    ) -> KVBatchMeta:
        call = Operation(
            "put",
            partition_id,
            n_keys=_count(sample_ids),
            n_bytes=sum(put_bytes.values()),
            sample_ids=sample_ids,
            fields=list(put_bytes),
            put_bytes=put_bytes,
            tags=tags,
            extra=extra,
        )
        with self._observed(call):
            meta = run(call)
            if call.tags is not tags:
                meta.tags = None if tags is None else [dict(tag) for tag in tags]
        return meta

    def get_samples(
        self, sample_ids: list[str], partition_id: str, select_fields: list[str], **extra: Any
    ) -> TensorDict:
        with self._observed(_get(sample_ids, partition_id, select_fields, extra)) as call:
            answer = self._inner.get_samples(sample_ids, partition_id, select_fields, **call.extra)
            call.n_bytes = sum(_bytes_by_field(answer).values())
        return answer

    def get_columns(
        self,
        sample_ids: list[str],
        partition_id: str,
        select_fields: list[str],
        *,
        pad_values: Mapping[str, float] | None = None,
        width: int = 0,
        **extra: Any,
    ) -> dict[str, Column]:
        with self._observed(_get(sample_ids, partition_id, select_fields, extra)) as call:
            answer = self._inner.get_columns(
                sample_ids,
                partition_id,
                select_fields,
                pad_values=pad_values,
                width=width,
                **call.extra,
            )
            call.n_bytes = sum(_bytes_by_column(answer).values())
        return answer

    def clear_samples(self, sample_ids: list[str] | None, partition_id: str, **extra: Any) -> None:
        n_keys = _count(sample_ids)
        with self._observed(Operation("clear", partition_id, n_keys, sample_ids=sample_ids)):
            self._inner.clear_samples(sample_ids, partition_id, **extra)

    def withdraw_samples(self, sample_ids: list[str], partition_id: str) -> None:
        call = Operation(
            "clear",
            partition_id,
            n_keys=_count(sample_ids),
            sample_ids=sample_ids,
            options={"withdrawn": True},
        )
        with self._observed(call):
            self._inner.withdraw_samples(sample_ids, partition_id)

    def close(self) -> None:
        with self._observed(Operation("close", "")):
            self._inner.close()

    def acknowledge(self, meta: KVBatchMeta) -> None:
        with self._observed(_settle("acknowledge", meta)):
            self._inner.acknowledge(meta)

    def renew(self, meta: KVBatchMeta) -> None:
        with self._observed(_settle("renew", meta)):
            self._inner.renew(meta)

    def release(self, meta: KVBatchMeta) -> None:
        with self._observed(_settle("release", meta)):
            self._inner.release(meta)

    def count_samples(
        self, partition_id: str, task_name: str, required_fields: list[str]
    ) -> TaskCounts:
        """Pass on; looking at a store is no operation on its samples."""
        return self._inner.count_samples(partition_id, task_name, required_fields)

    def read_origins(
        self, sample_ids: Sequence[str], partition_id: str, fields: Sequence[str]
    ) -> dict[str, int]:
        """Pass on, as `count_samples`."""
        return self._inner.read_origins(sample_ids, partition_id, fields)

    def list_partitions(self) -> list[PartitionSummary]:
        """Pass on, as `count_samples`."""
        return self._inner.list_partitions()

    def list_samples(
        self, partition_id: str, *, start: int = 0, limit: int = 100
    ) -> list[SampleState]:
        """Pass on, as `count_samples`."""
        return self._inner.list_samples(partition_id, start=start, limit=limit)

    def read_sample(self, partition_id: str, sample_id: str) -> SampleState | None:
        """Pass on, as `count_samples`."""
        return self._inner.read_sample(partition_id, sample_id)

    def find_samples(
        self, partition_id: str, *, tag: str, value: object, limit: int = 100
    ) -> list[SampleState]:
        """Pass on, as `count_samples`."""
        return self._inner.find_samples(partition_id, tag=tag, value=value, limit=limit)

    def list_claims(self, partition_id: str) -> list[ClaimSummary]:
        """Pass on, as `count_samples`."""
        return self._inner.list_claims(partition_id)

    def list_shares(self, partition_id: str) -> list[ShareSummary]:
        """Pass on, as `count_samples`."""
        return self._inner.list_shares(partition_id)

    def scan_states(self, partition_id: str, *, start: int = 0, limit: int = 10_000) -> StatePage:
        """Pass on, as `count_samples`."""
        return self._inner.scan_states(partition_id, start=start, limit=limit)

    def reset_consumption(self, partition_id: str, task_name: str, sample_ids: list[str]) -> int:
        """Pass on; who changes a store by hand keeps the record of it."""
        return self._inner.reset_consumption(partition_id, task_name, sample_ids)

    def end_claim(self, partition_id: str, claim: str, *, expired_only: bool = True) -> int:
        """Pass on, as `reset_consumption`."""
        return self._inner.end_claim(partition_id, claim, expired_only=expired_only)

    def list_storage(self) -> list[StorageSummary]:
        """Pass on, as `count_samples`."""
        return self._inner.list_storage()

    def read_totals(self) -> dict[str, int]:
        """Pass on, as `count_samples`."""
        return self._inner.read_totals()

    @contextmanager
    def _observed(self, call: Operation) -> Iterator[Operation]:
        call._inner = self._inner
        begun = [(observer, self._guarded(observer.begin, call)) for observer in self._observers]
        started = time.perf_counter()
        try:
            yield call
        except BaseException as error:
            call.error = error
            raise
        finally:
            call.wall_s = time.perf_counter() - started
            for observer, state in reversed(begun):
                self._guarded(observer.end, call, state)

    def _guarded(self, tell: Callable[..., Any], call: Operation, *state: Any) -> Any:
        """Call an observer; the operation is not to fail because of it, a claim would be lost."""
        try:
            return tell(call, *state)
        except Exception:  # a listener is the user's own, and may raise whatever it likes
            with self._failures_lock:
                self._failures += 1
            logger.exception("data_plane_observer_failed", op=call.op, status=call.status)
            return None


def _get(
    sample_ids: list[str], partition_id: str, fields: list[str], extra: dict[str, Any]
) -> Operation:
    return Operation(
        "get",
        partition_id,
        n_keys=_count(sample_ids),
        sample_ids=sample_ids,
        fields=fields,
        extra=extra,
    )


def _settle(op: Literal["acknowledge", "release", "renew"], meta: KVBatchMeta) -> Operation:
    return Operation(
        op,
        getattr(meta, "partition_id", ""),
        n_keys=_count(getattr(meta, "sample_ids", ())),
        sample_ids=getattr(meta, "sample_ids", ()),
        tasks=[task] if isinstance(task := getattr(meta, "task_name", None), str) else [],
    )


def _count(sample_ids: object) -> int:
    """How many ids there are; 0 of what the inner client is going to refuse."""
    try:
        return len(sample_ids) if isinstance(sample_ids, Sized) else 0
    except Exception:  # noqa: BLE001  # len() of whatever was given may raise
        return 0


# Whoever only looks at what was told needs no torch, whoever puts or gets has imported it.


def _bytes_by_field(fields: TensorDict | None) -> dict[str, int]:
    from observability.payload import bytes_by_field

    return bytes_by_field(fields)


def _bytes_by_column(
    columns: Mapping[str, Column],
    lengths: Sequence[int] | None = None,
    ragged: Collection[str] = (),
) -> dict[str, int]:
    from observability.payload import bytes_by_column

    return bytes_by_column(columns, lengths, ragged)
