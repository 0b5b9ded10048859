"""`Event`, which describes one operation, and `log_event`, which logs it."""

from __future__ import annotations

from typing import Any, TypeAlias  # Any: ObservabilityConfig.callback takes an open dict

import structlog

Event: TypeAlias = dict[str, Any]
"""The event of one operation, with the keys ``op``, ``partition_id``, ``n_keys``, ``n_bytes``,
``wall_ms`` and ``status``."""


def log_event(event: Event) -> None:
    """Log one operation as one line through the application's structlog configuration."""
    structlog.get_logger("observability").info("data_plane_op", **event)
