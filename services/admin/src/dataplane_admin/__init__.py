"""The admin service of a data plane."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dataplane_admin.app import create_app
    from dataplane_admin.settings import Settings

__all__ = ["Settings", "create_app"]

# Questions from the command line need neither, and would wait for them to be imported.
_LAZY = {"Settings": "settings", "create_app": "app"}


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(importlib.import_module(f"dataplane_admin.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
