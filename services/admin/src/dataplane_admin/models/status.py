"""Status of the service."""

from __future__ import annotations

from typing import Literal

from dataplane_admin.models.base import Model, Text


class LiveStatus(Model):
    """Connection to the data plane."""

    configured: bool
    """True if the service was started with a data plane to inspect."""
    attached: bool
    """True if the newest attempt to read it succeeded."""
    source: Text
    """The data plane inspected, such as ``Ray at 10.0.0.1:6379``; empty if none."""
    error: Text | None
    """One sentence on why the newest attempt failed or, if ``attached``, on why the data plane no
    longer answers its clients. Else None."""
    at_ns: int | None
    """Time of the snapshot that is shown; None without one."""
    age_s: float | None
    """Age of that snapshot in seconds; None without a snapshot."""
    revision: int
    """Number that grows when something that is shown changes."""


class StoreStatus(Model):
    """Stored telemetry."""

    writable: bool
    """True if telemetry can be stored."""
    error: Text | None
    """One sentence on why telemetry cannot be stored; None if it can."""
    revision: int
    """Number that grows with every change."""
    traces: int
    """Stored traces."""
    spans: int
    """Stored spans."""
    events: int
    """Stored lifecycle events."""
    samples: int
    """Distinct samples named by stored events."""
    nbytes: int
    """Bytes on disk."""
    oldest_ns: int | None
    """Receive time of the oldest stored trace or event; None without any."""


class TelemetryStatus(Model):
    """Telemetry received since the service started."""

    ingested: dict[Text, int]
    """Number of new ``spans`` and ``events``."""
    repeated: int
    """Spans and events that were stored already: exporter retries."""
    refused: int
    """Rejected spans, log records and data points; senders were notified."""
    ignored: int
    """Log records not stored: outside of traces, or sample text without ``--keep-sample-text``."""


class Status(Model):
    """State of the service."""

    name: str
    """Always ``dataplane-admin``."""
    version: str
    """Version of the distribution."""
    now_ns: int
    """The service's clock."""
    started_ns: int
    """Start time of this process."""
    live: LiveStatus
    store: StoreStatus
    telemetry: TelemetryStatus
    actions: bool
    """True if actions are allowed."""
    subscribers: int
    """Connections with live updates."""


class Liveness(Model):
    """Answer of a live process."""

    status: Literal["ok"] = "ok"


class Readiness(Model):
    """Readiness of the service to store telemetry."""

    ready: bool
    """True if telemetry can be stored, regardless of the data plane."""
    store: Text
    """``ok``, or why telemetry cannot be stored."""
    live: Text
    """``attached``, ``not configured``, or ``error`` of the connection to the data plane."""


class Version(Model):
    """Name and version of the service."""

    name: str
    version: str
