"""Imports from TransferQueue.

TransferQueue imports Yuanrong's libraries wherever they are installed. These contain their own gRPC
and protobuf, which crash a process that has loaded another library's copies, such as NIXL's. So
this module delays the import until a client of the backend ``yuanrong`` first uses the libraries.
"""

from __future__ import annotations

import copy
import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from math import ceil
from types import ModuleType
from typing import Any  # Any: TransferQueue's schemas have no static types

_CONFLICTING = ("nixl_cu12._bindings", "nixl_cu13._bindings")


@contextmanager
def _without(name: str) -> Iterator[None]:
    """Hide a package from imports in the block, unless it is imported already."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]  # importlib then raises ImportError
    try:
        yield
    finally:
        del sys.modules[name]


with _without("yr"):
    from transfer_queue import interface, metadata
    from transfer_queue.client import AsyncTransferQueueClient
    from transfer_queue.controller import TransferQueueController
    from transfer_queue.metadata import BatchMeta, extract_field_schema
    from transfer_queue.sampler import BaseSampler, SequentialSampler
    from transfer_queue.storage.bootstrap import StorageBootstrapProvider
    from transfer_queue.storage.clients import yuanrong_client
    from transfer_queue.storage.clients.ray_storage_client import RayObjectRefStorage
    from transfer_queue.storage.managers.base import (
        KVStorageManager,
        StorageManager,
        StorageManagerFactory,
    )
    from transfer_queue.storage.managers.simple_storage_manager import AsyncSimpleStorageManager
    from transfer_queue.storage.simple_storage import SimpleStorageUnit
    from transfer_queue.utils.zmq_utils import ZMQMessage, ZMQRequestType

__all__ = [
    "AsyncSimpleStorageManager",
    "AsyncTransferQueueClient",
    "BaseSampler",
    "BatchMeta",
    "KVStorageManager",
    "RayObjectRefStorage",
    "SequentialSampler",
    "SimpleStorageUnit",
    "StorageBootstrapProvider",
    "StorageManager",
    "StorageManagerFactory",
    "TransferQueueController",
    "ZMQMessage",
    "ZMQRequestType",
    "extract_field_schema",
    "fast_metas",
    "interface",
    "set_yuanrong_timeout",
]


_users = 0
# Reentrant: a garbage collection under the lock may close a manager, which takes the lock again.
_patching = threading.RLock()


@contextmanager
def fast_metas(extract: Callable[[Any], dict[str, dict[str, Any]]]) -> Iterator[None]:
    """Replace, in this process, two slow functions that TransferQueue calls after each put.

    The end of the last block in the process restores them.

    Args:
        extract: faster function with the result of `extract_field_schema`.
    """
    global _users
    with _patching:
        _users += 1
        metadata.extract_field_schema = extract
        BatchMeta.chunk_by_partition = _chunk_by_partition
    try:
        yield
    finally:
        with _patching:
            _users -= 1
            if not _users:
                metadata.extract_field_schema = extract_field_schema
                BatchMeta.chunk_by_partition = _chunk_row_by_row


_chunk_row_by_row = BatchMeta.chunk_by_partition


def _chunk_by_partition(meta: Any) -> list[Any]:
    """Return copies of one partition each; TransferQueue's function copies row by row."""
    if len(set(meta.partition_ids)) != 1:
        return _chunk_row_by_row(meta)
    # BatchMeta copies the lists and dicts that it gets, but not the values in them.
    shapes = "per_sample_shapes"
    return [
        BatchMeta(
            global_indexes=meta.global_indexes,
            partition_ids=meta.partition_ids,
            field_schema={
                name: {**field, shapes: list(field[shapes])} if field.get(shapes) else field
                for name, field in meta.field_schema.items()
            },
            production_status=meta.production_status,
            extra_info=meta.extra_info,
            custom_meta=copy.deepcopy(meta.custom_meta),
            _custom_backend_meta=meta._custom_backend_meta,
        )
    ]


class _YuanrongWhenUsed(ModuleType):
    """Stand-in for Yuanrong's module; its first use imports the module."""

    timeout_ms = 60_000
    """Deadline of a connection and of a call; the library's default."""

    def __getattr__(self, name: str) -> object:
        if self.__name__ not in sys.modules:
            for other in _CONFLICTING:
                if other in sys.modules:
                    raise ImportError(
                        f"{self.__name__} cannot be loaded into a process that has loaded {other}: "
                        "it would crash; use another backend, or do not import NIXL"
                    )
        value = getattr(importlib.import_module(self.__name__), name)
        if name == "KVClient":
            return partial(
                value, connect_timeout_ms=self.timeout_ms, req_timeout_ms=self.timeout_ms
            )
        return value


def set_yuanrong_timeout(timeout_s: float) -> None:
    """Set the deadline of each call, for Yuanrong clients that this process creates from now on."""
    datasystem = _YuanrongWhenUsed("yr.datasystem")
    datasystem.timeout_ms = ceil(timeout_s * 1000)
    yuanrong_client.datasystem = datasystem


if not yuanrong_client.YUANRONG_DATASYSTEM_IMPORTED and find_spec("yr") is not None:
    yuanrong_client.datasystem = _YuanrongWhenUsed("yr.datasystem")
    yuanrong_client.YUANRONG_DATASYSTEM_IMPORTED = True
