"""`ObservedClient`: a client that forwards every call and reports it to observers.

Only this class wraps every method of the contract. Events, spans, log records and metrics have an
`Observer` each. An observer may replace the tags of a result. It must not change the rest of the
result, or the error.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal  # Any: tags and extra keywords are the caller's own

from dataplane_core import (
    Capabilities,
    DataPlaneClient,
    KVBatchMeta,
)
from dataplane_core.documented_client import accepts_lengths, as_client
from dataplane_core.inspector import StoreInspector
from dataplane_core.meta import LEASE
from observability.middleware.observers import Observers
from observability.middleware.operation import (
    Observer,
    Operation,
    bool_or_false,
    int_or_zero,
)

if TYPE_CHECKING:
    from tensordict import TensorDict

    from dataplane_core.tensors.columns import Column


class ObservedClient(DataPlaneClient):
    """A client that forwards calls to ``inner`` and reports them to ``observers``.

    Extra keywords of the caller are forwarded to ``inner``. Observers may replace the tags of a put
    and add extra keywords.

    Args:
        inner: the wrapped client. Any object with the documented methods is accepted, see
            `dataplane_core.documented_client`.
        observers: observers in the order in which they begin.
    """

    def __init__(self, inner: DataPlaneClient, observers: Sequence[Observer]) -> None:
        self._wrapped = inner
        self._inner = as_client(inner)  # with the methods that ``inner`` lacks
        self._observers = Observers(observers)

    @property
    def inner(self) -> DataPlaneClient:
        """The wrapped client."""
        return self._wrapped

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]  # depends on the inner client
        """The capabilities of the wrapped client."""
        return self._inner.capabilities

    @property
    def store_key(self) -> Hashable:
        return self._inner.store_key

    @property
    def failures(self) -> int:
        """Number of times an observer raised."""
        return self._observers.failures

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
            "register",
            partition_id,
            n_keys=int_or_zero(num_samples),
            fields=fields,
            tasks=consumer_tasks,
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
            options={"batch_size": int_or_zero(batch_size), "blocking": bool_or_false(blocking)},
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
            if call.tags is not tags:  # an observer added the origin; the caller gets its own tags
                meta.tags = None if tags is None else [dict(tag) for tag in tags]
        claim = extra.get("claim")
        if claim is not None and extra.get("acknowledge"):
            acknowledged, put_ids = _lease_operation("acknowledge", claim), set(meta.sample_ids)
            ids = [each for each in acknowledged.sample_ids or () if each in put_ids]
            acknowledged.sample_ids, acknowledged.n_keys = ids, len(ids)
            with self._observed(acknowledged):
                pass  # only reported: the put acknowledged its samples
        return meta

    def get_samples(
        self, sample_ids: list[str], partition_id: str, select_fields: list[str], **extra: Any
    ) -> TensorDict:
        with self._observed(
            _read_operation(sample_ids, partition_id, select_fields, extra)
        ) as call:
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
        lengths: Sequence[int] | None = None,
        **extra: Any,
    ) -> dict[str, Column]:
        if accepts_lengths(self._inner):
            extra["lengths"] = lengths
        with self._observed(
            _read_operation(sample_ids, partition_id, select_fields, extra)
        ) as call:
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
        with self._observed(_lease_operation("acknowledge", meta)):
            self._inner.acknowledge(meta)

    def renew(self, meta: KVBatchMeta) -> None:
        with self._observed(_lease_operation("renew", meta)):
            self._inner.renew(meta)

    def release(self, meta: KVBatchMeta) -> None:
        with self._observed(_lease_operation("release", meta)):
            self._inner.release(meta)

    def read_origins(
        self, sample_ids: Sequence[str], partition_id: str, fields: Sequence[str]
    ) -> dict[str, int]:
        """Forward the call; it is not reported, because it only inspects samples."""
        return self._inner.read_origins(sample_ids, partition_id, fields)

    @property
    def inspector(self) -> StoreInspector:
        """The inner client's inspector, whose calls are not reported to observers."""
        return self._inner.inspector

    @contextmanager
    def _observed(self, call: Operation) -> Iterator[Operation]:
        call._inner = self._inner
        with self._observers.observe(call):
            yield call


def _read_operation(
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


def _lease_operation(
    op: Literal["acknowledge", "release", "renew"], meta: KVBatchMeta
) -> Operation:
    return Operation(
        op,
        getattr(meta, "partition_id", ""),
        n_keys=_count(getattr(meta, "sample_ids", ())),
        sample_ids=getattr(meta, "sample_ids", ()),
        tasks=[task] if isinstance(task := getattr(meta, "task_name", None), str) else [],
    )


def _count(sample_ids: object) -> int:
    """Return the number of ids; 0 for an argument that the inner client will reject."""
    try:
        return len(sample_ids) if isinstance(sample_ids, Sized) else 0
    except Exception:  # noqa: BLE001  # len() of a user's object may raise
        return 0


# These two import torch when they are called: a process that only reads telemetry needs no torch.


def _bytes_by_field(fields: TensorDict | None) -> dict[str, int]:
    if fields is None:
        return {}
    from observability.middleware.payload import bytes_by_field

    return bytes_by_field(fields)


def _bytes_by_column(
    columns: Mapping[str, Column],
    lengths: Sequence[int] | None = None,
    ragged: Collection[str] = (),
) -> dict[str, int]:
    from observability.middleware.payload import bytes_by_column

    return bytes_by_column(columns, lengths, ragged)
