"""The data-plane contract on TransferQueue over Ray.

The names are loaded when they are first used, so that the directory's process, which needs neither
torch nor TransferQueue, does not import them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dataplane_tq.any_queue.inspector import QueueInspector
    from dataplane_tq.client import TQDataPlaneClient
    from dataplane_tq.local_ray import join_ray, start_local_ray

__all__ = [
    "QueueInspector",
    "TQDataPlaneClient",
    "join_ray",
    "start_local_ray",
]

_MODULES = {
    "QueueInspector": "dataplane_tq.any_queue.inspector",
    "TQDataPlaneClient": "dataplane_tq.client",
    "join_ray": "dataplane_tq.local_ray",
    "start_local_ray": "dataplane_tq.local_ray",
}


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
