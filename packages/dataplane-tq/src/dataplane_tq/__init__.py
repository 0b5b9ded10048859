"""The data-plane contract on TransferQueue over Ray.

The client is loaded when it is first used, so that the directory's process, which needs neither
torch nor TransferQueue, does not import them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dataplane_tq.client import TQDataPlaneClient

__all__ = ["TQDataPlaneClient"]


def __getattr__(name: str) -> object:
    if name == "TQDataPlaneClient":
        from dataplane_tq.client import TQDataPlaneClient

        return TQDataPlaneClient
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
