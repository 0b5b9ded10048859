"""Wrappers of the methods of TransferQueue's client, which `TransferQueueInstrumentor` installs."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import wraps
from typing import Any  # Any: TransferQueue has no types

from opentelemetry import trace

from observability.adapters import transfer_queue_origins as origins
from observability.adapters.transfer_queue_keys import Keys
from observability.middleware.lifecycle import Lifecycle
from observability.middleware.observers import Observers
from observability.middleware.operation import Op, Operation
from observability.middleware.origin import TRACEPARENT_TAG
from observability.middleware.payload import bytes_by_field
from observability.middleware.tracing import Tracing

_observe = Observers([Tracing(), Lifecycle()]).observe
_keys = Keys()


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
        with _observe(call):
            if metadata is not None:
                origins.add(metadata, data.keys())
            result = await method(client, data, metadata, partition_id, *args, **kwargs)
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
            return origins.hide(await method(client, *args, **kwargs))
        fields, task = arguments.get("data_fields") or (), arguments.get("task_name") or ""
        call = Operation(
            "claim_meta",
            arguments.get("partition_id", ""),
            fields=fields,
            tasks=[task],
            started_ns=time.time_ns(),
        )
        try:
            meta = origins.hide(await method(client, *args, **kwargs))
        except BaseException:  # observers see every outcome
            with _observe(call):
                raise
        # Empty claims are not recorded: a consumer that polls would record thousands of spans.
        if len(meta.global_indexes):
            with _observe(call):
                await _describe(client, call, meta)
                call.fields = list(fields)
        return meta

    return traced_claim


WRAPPERS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "async_put": _wrap_put,
    "async_get_meta": _wrap_claim,
    "async_get_data": _wrap_batch_method("get"),
    "async_clear_samples": _wrap_batch_method("clear"),
    "async_clear_partition": _wrap_batch_method("clear"),
    "async_kv_list": origins.wrap_listing,
    "async_kv_retrieve_meta": origins.wrap_retrieval,
    "async_set_custom_meta": origins.wrap_tagging,  # puts call it, too
}
"""Wrappers by name of the method of `transfer_queue.client.AsyncTransferQueueClient`."""


def _partition_of(meta: Any) -> str:
    return str(meta.partition_ids[0]) if meta is not None and len(meta.partition_ids) else ""


async def _describe(client: Any, call: Operation, meta: Any) -> None:
    """Set fields, origins and samples of an operation from the metadata, if its span is recorded.

    The sample ids are those of the first partition.
    """
    if not trace.get_current_span().is_recording():
        return
    call.partition_id, call.n_keys = _partition_of(meta), len(meta.global_indexes)
    call.fields = list(meta.field_schema)
    call.tags = [{TRACEPARENT_TAG: origin} for origin in origins.of(meta)]
    call.sample_ids = await _keys.names(client, meta, call.partition_id)
