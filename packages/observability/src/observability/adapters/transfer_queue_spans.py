"""Wrappers of the methods of TransferQueue's client, which `TransferQueueInstrumentor` installs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import wraps
from typing import Any  # Any: TransferQueue has no types

from opentelemetry import trace

from observability.middleware.lifecycle import Lifecycle
from observability.middleware.observers import Observers
from observability.middleware.operation import Op, Operation
from observability.middleware.origin import TRACEPARENT_TAG
from observability.middleware.payload import bytes_by_field
from observability.middleware.tracing import Tracing

_observe = Observers([Tracing(), Lifecycle()]).observe


def _wrap_batch_method(op: Op) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator of methods whose first argument is a batch or the name of a partition."""

    def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        async def traced_method(client: Any, *args: Any, **kwargs: Any) -> Any:
            batch = args[0] if args else next(iter(kwargs.values()), None)
            call = Operation(op, batch if isinstance(batch, str) else _partition_of(batch))
            with _observe(call):
                if isinstance(batch, str):
                    call.sample_ids = None  # all samples of the partition
                else:
                    await _describe(client, call, batch)
                result = await method(client, *args, **kwargs)
                call.n_bytes = sum(bytes_by_field(result).values())
            return result

        return traced_method

    return wrap


def _wrap_put(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    async def traced_put(
        client: Any,
        data: Any,
        metadata: Any = None,
        partition_id: str | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        call = Operation("put", partition_id or _partition_of(metadata))
        call.put_bytes = bytes_by_field(data)
        call.n_bytes = sum(call.put_bytes.values())
        tags = [] if metadata is None else metadata.custom_meta
        call.tags = list(tags) if any(tags) else None
        with _observe(call):
            try:
                if call.tags is not None:
                    metadata.custom_meta = call.tags  # the caller's tags and the origin
                result = await method(client, data, metadata, partition_id, *args, **kwargs)
            finally:
                if call.tags is not None:
                    metadata.custom_meta = tags
            await _describe(client, call, result)
            call.fields = list(data.keys())
        return result

    return traced_put


def _wrap_claim(method: Callable[..., Any]) -> Callable[..., Any]:
    names = ("data_fields", "batch_size", "partition_id", "mode", "task_name")

    @wraps(method)
    async def traced_claim(client: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        if arguments.get("mode", "fetch") != "fetch":  # other modes consume no samples
            return _without_origins(await method(client, *args, **kwargs))
        fields, task = arguments.get("data_fields") or (), arguments.get("task_name") or ""
        call = Operation(
            "claim_meta",
            arguments.get("partition_id", ""),
            fields=fields,
            tasks=[task],
            started_ns=time.time_ns(),
        )
        try:
            meta = await method(client, *args, **kwargs)
        except BaseException:  # observers see every outcome
            with _observe(call):
                raise
        # Empty claims are not recorded: a consumer that polls would record thousands of spans.
        if len(meta.global_indexes):
            with _observe(call):
                await _describe(client, call, meta)
                call.fields = list(fields)
        return _without_origins(meta)

    return traced_claim


def _wrap_listing(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    async def listing_without_origins(*args: Any, **kwargs: Any) -> Any:
        partitions = await method(*args, **kwargs)
        for samples in partitions.values():
            _remove_origins(samples.values())
        return partitions

    return listing_without_origins


WRAPPERS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "async_put": _wrap_put,
    "async_get_meta": _wrap_claim,
    "async_get_data": _wrap_batch_method("get"),
    "async_clear_samples": _wrap_batch_method("clear"),
    "async_clear_partition": _wrap_batch_method("clear"),
    "async_kv_list": _wrap_listing,
}
"""Wrappers by name of the method of `transfer_queue.client.AsyncTransferQueueClient`."""


def _without_origins(meta: Any) -> Any:
    # Tags are removed even if the claim's span is not recorded: the put's span may have been.
    _remove_origins(meta.custom_meta)
    return meta


def _remove_origins(tags_of_samples: Iterable[dict[str, Any]]) -> None:
    for tags in tags_of_samples:
        tags.pop(TRACEPARENT_TAG, None)


def _partition_of(meta: Any) -> str:
    return str(meta.partition_ids[0]) if meta is not None and len(meta.partition_ids) else ""


async def _describe(client: Any, call: Operation, meta: Any) -> None:
    """Set fields, tags and samples of an operation from the metadata, if its span is recorded.

    The sample ids are those of the first partition.
    """
    if not trace.get_current_span().is_recording():
        return
    call.partition_id, call.n_keys = _partition_of(meta), len(meta.global_indexes)
    call.fields = list(meta.field_schema)
    if call.tags is None and any(meta.custom_meta):
        call.tags = list(meta.custom_meta)
    partition_by_row = zip(meta.global_indexes, meta.partition_ids, strict=True)
    rows = [row for row, partition in partition_by_row if partition == call.partition_id]
    keys: Sequence[str | None] = [None] * len(rows)
    if rows:
        # The query fails, for example, if samples have no keys. An error raised here would make the
        # program lose its put or claim.
        with suppress(Exception):
            keys = await client.async_kv_retrieve_keys(rows, call.partition_id)
    call.sample_ids = [
        f"#{row}" if key is None else key for row, key in zip(rows, keys, strict=True)
    ]
