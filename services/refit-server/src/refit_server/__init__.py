"""Deployable control plane for weight refit.

Importing this package imports no gRPC, so that a probe asks for health without loading a server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from refit_server.server import serve

__all__ = ["serve"]


def __getattr__(name: str) -> object:
    if name in __all__:
        from refit_server.server import serve

        return serve
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
