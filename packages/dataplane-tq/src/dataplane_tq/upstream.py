"""What is used of TransferQueue, and how it is imported.

TransferQueue imports Yuanrong's libraries wherever they are installed. They bring a gRPC and a
protobuf of their own that end a process in which another library's are loaded, those of NIXL for
one. So here they are imported when a client of that backend first uses them.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType

_IN_THE_WAY = ("nixl_cu12._bindings", "nixl_cu13._bindings")


@contextmanager
def _without(name: str) -> Iterator[None]:
    """Let a package look as if it were not installed, unless it is imported already."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]  # what importlib takes for "not there"
    try:
        yield
    finally:
        del sys.modules[name]


with _without("yr"):
    from transfer_queue.client import AsyncTransferQueueClient
    from transfer_queue.controller import TransferQueueController
    from transfer_queue.metadata import BatchMeta, extract_field_schema
    from transfer_queue.sampler import BaseSampler, SequentialSampler
    from transfer_queue.storage.bootstrap import StorageBootstrapProvider
    from transfer_queue.storage.clients import yuanrong_client
    from transfer_queue.storage.managers.base import (
        KVStorageManager,
        StorageManager,
        StorageManagerFactory,
    )
    from transfer_queue.storage.managers.simple_storage_manager import AsyncSimpleStorageManager

__all__ = [
    "AsyncSimpleStorageManager",
    "AsyncTransferQueueClient",
    "BaseSampler",
    "BatchMeta",
    "KVStorageManager",
    "SequentialSampler",
    "StorageBootstrapProvider",
    "StorageManager",
    "StorageManagerFactory",
    "TransferQueueController",
    "extract_field_schema",
]


class _YuanrongWhenUsed(ModuleType):
    def __getattr__(self, name: str) -> object:
        if self.__name__ not in sys.modules:
            for other in _IN_THE_WAY:
                if other in sys.modules:
                    raise ImportError(
                        f"{self.__name__} cannot be loaded into a process that holds {other}: it "
                        "would end by a segmentation fault; take another backend, or keep NIXL out"
                    )
        return getattr(importlib.import_module(self.__name__), name)


if not yuanrong_client.YUANRONG_DATASYSTEM_IMPORTED and find_spec("yr") is not None:
    yuanrong_client.datasystem = _YuanrongWhenUsed("yr.datasystem")
    yuanrong_client.YUANRONG_DATASYSTEM_IMPORTED = True
