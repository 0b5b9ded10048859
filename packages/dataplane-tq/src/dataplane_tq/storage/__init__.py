"""Starts, describes and stops the storage backends of TransferQueue, one module each."""

from dataplane_tq.storage.base import StorageBackend
from dataplane_tq.storage.mooncake import Mooncake
from dataplane_tq.storage.packed import Packed
from dataplane_tq.storage.ray_store import RayStore
from dataplane_tq.storage.simple import Simple
from dataplane_tq.storage.yuanrong import Yuanrong

BACKENDS: dict[str, type[StorageBackend]] = {
    "mooncake_cpu": Mooncake,
    "packed": Packed,
    "ray": RayStore,
    "simple": Simple,
    "yuanrong": Yuanrong,
}
"""Class that starts each backend, by the value of the configuration key ``backend``."""

__all__ = ["BACKENDS", "StorageBackend"]
