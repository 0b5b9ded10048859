"""`MetricsDataPlaneClient`: one event per operation, and running totals.

The wrapper never holds its lock while the inner client works or a listener runs, because either
may block for as long as it likes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal  # Any: tags and extra keywords are the caller's own

import structlog

from dataplane_core import (
    Capabilities,
    DataPlaneClient,
    KVBatchMeta,
    ObservabilityConfig,
    PartitionSummary,
    SampleState,
    StorageSummary,
    TaskCounts,
)
from observability.events import Event, log_event
from observability.outstanding import Outstanding
from observability.payload import bytes_by_column, bytes_by_field

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
]

logger = structlog.get_logger("observability")


@dataclass
class _Call:
    """One call under way. ``settle`` enters it into the account if it succeeds."""

    op: Op
    partition_id: str
    n_keys: int = 0
    n_bytes: int = 0
    settle: Callable[[], None] | None = None


class MetricsDataPlaneClient(DataPlaneClient):
    """A client that does what ``inner`` does and tells what each operation cost.

    Every call is passed on as it came, with any further keyword that ``inner`` understands, and its
    answer or error is returned as it is. The account covers what went through this object: samples
    that another client puts or clears in the same store are not seen.

    Args:
        inner: the client that does the work.
        on_event: called after each operation with a dict of

            - ``op``: register, claim_meta, get_data, check_consumption_status, put, get, clear or
              close;
            - ``partition_id``: empty for close;
            - ``n_keys``: samples named by the call; for claim_meta those claimed, for register the
              declared number, for ``clear_samples(None, ...)`` 0;
            - ``n_bytes``: bytes of the tensors put or read, of ragged ones the packed values, of
              columns that were read with their padding;
            - ``wall_ms``: duration of the call, in milliseconds;
            - ``status``: ok, timeout (the call raised a TimeoutError) or error.

            It runs in the thread of the caller, possibly in several at once. If it raises, that is
            logged and the operation's own outcome stands. None: no events, totals only.
    """

    def __init__(
        self, inner: DataPlaneClient, on_event: Callable[[Event], None] | None = None
    ) -> None:
        self._inner = inner
        self._on_event = on_event
        self._lock = threading.Lock()
        self._outstanding = Outstanding()
        self._total_ops = 0
        self._total_bytes = 0
        self._total_keys = 0
        self._last_put_bytes_per_key = 0

    @property
    def inner(self) -> DataPlaneClient:
        """The wrapped client."""
        return self._inner

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]  # as the inner instance says
        """The promises of the wrapped client."""
        return self._inner.capabilities

    def snapshot(self) -> dict[str, int]:
        """The totals at this moment. Calls that raised have changed none of them.

        Returns:
            - ``total_ops``, ``total_bytes``, ``total_keys``: sums over the events;
            - ``bytes_outstanding``, ``n_keys_outstanding``: put and not cleared. A field of a
              sample counts once, with its last value; samples without tensors count as keys;
            - ``peak_bytes_outstanding``: the most that ``bytes_outstanding`` ever was;
            - ``max_bytes_per_key_seen``: the most that one sample ever held;
            - ``last_put_bytes_per_key``: bytes of the last put that named samples, divided by
              their number and rounded down.
        """
        with self._lock:
            return {
                "total_ops": self._total_ops,
                "total_bytes": self._total_bytes,
                "total_keys": self._total_keys,
                "bytes_outstanding": self._outstanding.n_bytes,
                "peak_bytes_outstanding": self._outstanding.peak_n_bytes,
                "n_keys_outstanding": self._outstanding.n_keys,
                "max_bytes_per_key_seen": self._outstanding.max_bytes_per_key,
                "last_put_bytes_per_key": self._last_put_bytes_per_key,
            }

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
        with self._recorded(_Call("register", partition_id, n_keys=num_samples)):
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
        with self._recorded(_Call("claim_meta", partition_id)) as call:
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
            call.n_keys = meta.size
        return meta

    def get_data(
        self, meta: KVBatchMeta, select_fields: list[str] | None = None, **extra: Any
    ) -> TensorDict:
        with self._recorded(_Call("get_data", meta.partition_id, n_keys=meta.size)) as call:
            answer = self._inner.get_data(meta, select_fields, **extra)
            call.n_bytes = sum(bytes_by_field(answer).values())
        return answer

    def check_consumption_status(
        self, partition_id: str, task_names: list[str], **extra: Any
    ) -> bool:
        with self._recorded(_Call("check_consumption_status", partition_id)):
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
            bytes_by_field(fields),
            lambda: self._inner.put_samples(sample_ids, partition_id, fields, tags, **extra),
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
            bytes_by_column(columns, lengths, ragged),
            lambda: self._inner.put_columns(
                sample_ids, partition_id, columns, tags, lengths=lengths, ragged=ragged, **extra
            ),
        )

    def _put(
        self,
        sample_ids: list[str],
        partition_id: str,
        put: dict[str, int],
        run: Callable[[], KVBatchMeta],
    ) -> KVBatchMeta:
        n_bytes = sum(put.values())
        with self._lock:
            pending = self._outstanding.begin_put(partition_id)

        def settle() -> None:
            self._outstanding.add(pending, sample_ids, put)
            if sample_ids:
                self._last_put_bytes_per_key = n_bytes // len(sample_ids)

        call = _Call("put", partition_id, len(sample_ids), n_bytes, settle)
        try:
            with self._recorded(call):
                return run()
        finally:
            with self._lock:
                self._outstanding.end_put(pending)

    def get_samples(
        self, sample_ids: list[str], partition_id: str, select_fields: list[str], **extra: Any
    ) -> TensorDict:
        with self._recorded(_Call("get", partition_id, n_keys=len(sample_ids))) as call:
            answer = self._inner.get_samples(sample_ids, partition_id, select_fields, **extra)
            call.n_bytes = sum(bytes_by_field(answer).values())
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
        with self._recorded(_Call("get", partition_id, n_keys=len(sample_ids))) as call:
            answer = self._inner.get_columns(
                sample_ids, partition_id, select_fields, pad_values=pad_values, width=width, **extra
            )
            call.n_bytes = sum(bytes_by_column(answer).values())
        return answer

    def clear_samples(self, sample_ids: list[str] | None, partition_id: str, **extra: Any) -> None:
        n_keys = 0 if sample_ids is None else len(sample_ids)

        def settle() -> None:
            self._outstanding.clear(sample_ids, partition_id)

        with self._recorded(_Call("clear", partition_id, n_keys, settle=settle)):
            self._inner.clear_samples(sample_ids, partition_id, **extra)

    def close(self) -> None:
        with self._recorded(_Call("close", "")):
            self._inner.close()

    def acknowledge(self, meta: KVBatchMeta) -> None:
        """Pass on; settling a claim moves no data and is no event."""
        self._inner.acknowledge(meta)

    def renew(self, meta: KVBatchMeta) -> None:
        """Pass on, as `acknowledge`."""
        self._inner.renew(meta)

    def release(self, meta: KVBatchMeta) -> None:
        """Pass on, as `acknowledge`."""
        self._inner.release(meta)

    def count_samples(
        self, partition_id: str, task_name: str, required_fields: list[str]
    ) -> TaskCounts:
        """Pass on, as `acknowledge`."""
        return self._inner.count_samples(partition_id, task_name, required_fields)

    def list_partitions(self) -> list[PartitionSummary]:
        """Pass on, as `acknowledge`."""
        return self._inner.list_partitions()

    def list_samples(
        self, partition_id: str, *, start: int = 0, limit: int = 100
    ) -> list[SampleState]:
        """Pass on, as `acknowledge`."""
        return self._inner.list_samples(partition_id, start=start, limit=limit)

    def list_storage(self) -> list[StorageSummary]:
        """Pass on, as `acknowledge`."""
        return self._inner.list_storage()

    def read_totals(self) -> dict[str, int]:
        """Pass on, as `acknowledge`."""
        return self._inner.read_totals()

    @contextmanager
    def _recorded(self, call: _Call) -> Iterator[_Call]:
        status = "error"
        started = time.perf_counter()
        try:
            yield call
            status = "ok"
        except TimeoutError:
            status = "timeout"
            raise
        finally:
            wall_ms = (time.perf_counter() - started) * 1000
            if status == "ok":
                self._count(call)
            self._tell(call, status, wall_ms)

    def _count(self, call: _Call) -> None:
        with self._lock:
            self._total_ops += 1
            self._total_bytes += call.n_bytes
            self._total_keys += call.n_keys
            if call.settle is not None:
                call.settle()

    def _tell(self, call: _Call, status: str, wall_ms: float) -> None:
        if self._on_event is None:
            return
        event: Event = {
            "op": call.op,
            "partition_id": call.partition_id,
            "n_keys": call.n_keys,
            "n_bytes": call.n_bytes,
            "wall_ms": wall_ms,
            "status": status,
        }
        try:
            self._on_event(event)
        except Exception:
            # The operation is done: raising here would lose a claim that was made.
            logger.exception("data_plane_listener_failed", op=call.op, status=status)


def wrap(client: DataPlaneClient, observability_cfg: ObservabilityConfig) -> MetricsDataPlaneClient:
    """The middleware ``metrics`` of `dataplane_core.build_data_plane_client`.

    Events go to ``observability_cfg["callback"]`` if it is there, else to `log_event`.
    """
    return MetricsDataPlaneClient(client, observability_cfg.get("callback", log_event))
