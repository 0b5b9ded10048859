"""Admin service of a data plane: dashboard, API and telemetry store."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from dataplane_core.shadowing import require_package

if TYPE_CHECKING:
    from dataplane_admin.alerts import AlertRules, load_rules
    from dataplane_admin.app import create_app
    from dataplane_admin.ingest import Limits
    from dataplane_admin.serving.server import serve
    from dataplane_admin.settings import Settings
    from dataplane_admin.store import Retention

require_package("observability", "views")

__all__ = [
    "AlertRules",
    "Limits",
    "Retention",
    "Settings",
    "create_app",
    "load_rules",
    "serve",
]

# The commands need none of these, and importing them is slow.
_LAZY = {
    "AlertRules": "alerts",
    "Limits": "ingest",
    "Retention": "store",
    "Settings": "settings",
    "create_app": "app",
    "load_rules": "alerts",
    "serve": "serving.server",
}


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(importlib.import_module(f"dataplane_admin.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
