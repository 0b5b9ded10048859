"""Removal of the keys that a refused put has registered.

``kv_put`` of TransferQueue registers new keys in the controller before it calls the storage
manager, and leaves them there if the put fails. So the packed backend removes them itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any  # Any: TransferQueue's messages have no static types

from dataplane_tq.upstream import StorageManager, ZMQMessage, ZMQRequestType


async def forget_new_keys(
    manager: StorageManager, partition_id: str, indexes: Sequence[int], timeout_s: float
) -> None:
    """Remove from the controller the keys that have no tags.

    A row without a key stays, because the caller may have its meta and put again. After a put
    without a meta, it stays until TransferQueue's partition is cleared. The removal acts like a
    clear: a concurrent put to one of these keys is lost if it is reported before the removal.

    Args:
        manager: storage manager whose connection to the controller is used.
        partition_id: partition of the rows.
        indexes: global indexes of rows that have no values.
        timeout_s: deadline of each request in seconds.

    Raises:
        RuntimeError, TimeoutError: the controller failed, or did not answer in time.
    """
    answer = await ask_controller(
        manager,
        "KV_RETRIEVE_KEYS",
        {"global_indexes": list(indexes), "partition_id": partition_id},
        timeout_s,
    )
    keys = [key for key in answer["keys"] if key is not None]
    if not keys:
        return
    answer = await ask_controller(
        manager,
        "KV_RETRIEVE_META",
        {"keys": keys, "partition_id": partition_id, "create": False},
        timeout_s,
    )
    # Tags reach the controller after a put, so a row with tags is older than this put.
    meta = answer["metadata"]
    rows = zip(meta.global_indexes, meta.custom_meta, strict=True)
    new = [index for index, tags in rows if not tags]
    if new:
        body = {"global_indexes": new, "partition_ids": [partition_id] * len(new)}
        await ask_controller(manager, "CLEAR_META", body, timeout_s)


async def ask_controller(
    manager: StorageManager, request: str, body: dict[str, Any], timeout_s: float
) -> dict[str, Any]:
    """Return the controller's answer to a request, for example ``CLEAR_META``.

    The sockets of the manager's pool belong to its own event loop.
    """
    answered = exchange(manager, request, f"{request}_RESPONSE", body, timeout_s)
    return await asyncio.wrap_future(
        asyncio.run_coroutine_threadsafe(answered, manager._notify_loop)
    )


async def exchange(
    manager: StorageManager, request: str, response: str, body: Any, timeout_s: float
) -> dict[str, Any]:
    """Return the body of the controller's answer; call it in the manager's own event loop.

    Raises:
        RuntimeError, TimeoutError: the controller failed, or did not answer in time.
    """
    message = ZMQMessage.create(
        request_type=ZMQRequestType[request], sender_id=manager.storage_manager_id, body=body
    )
    async with manager.notify_pool.alease(manager.controller_info) as socket:
        try:
            await socket.send_multipart(message.serialize())
            parts = await asyncio.wait_for(socket.recv_multipart(copy=False), timeout_s)
        except BaseException:
            # Otherwise the next user of the socket would read a late answer as its own.
            socket.close(linger=0)
            raise
    answer = ZMQMessage.deserialize(parts)
    if answer.request_type != ZMQRequestType[response]:
        raise RuntimeError(f"{request}: {answer.body.get('message', answer.request_type)}")
    answered: dict[str, Any] = answer.body
    return answered
