"""The event of one operation, and the listener that logs it."""

from __future__ import annotations

from typing import Any, TypeAlias  # Any: ObservabilityConfig.callback takes an open dict

import structlog

Event: TypeAlias = dict[str, Any]
"""One operation: ``op``, ``partition_id``, ``n_keys``, ``n_bytes``, ``wall_ms``, ``status``."""


def log_event(event: Event) -> None:
    """Log one operation as one line through the application's structlog configuration."""
    structlog.get_logger("observability").info("data_plane_op", **event)
