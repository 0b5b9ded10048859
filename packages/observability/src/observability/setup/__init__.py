"""Setup of OpenTelemetry in a process, with the stock SDK: providers, export, shutdown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from observability.setup.counts import Counts, Signal
from observability.setup.process import setup

if TYPE_CHECKING:
    from observability.setup.telemetry import Telemetry

__all__ = ["Counts", "Signal", "Telemetry", "setup"]


def __getattr__(name: str) -> object:
    """Import `Telemetry` lazily, since it needs the SDK."""
    if name != "Telemetry":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from observability.setup import telemetry

    return telemetry.Telemetry
