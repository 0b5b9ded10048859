"""How the service itself is."""

from __future__ import annotations

from typing import Literal

from dataplane_admin.answers.models.base import Model, Text


class LiveStatus(Model):
    """How the service stands with the data plane it looks into."""

    asked: bool
    """Whether the service was told to look into a data plane at all."""
    attached: bool
    """Whether the newest attempt to read it succeeded."""
    source: Text
    """What is looked into, ``Ray at 10.0.0.1:6379`` for example; empty if nothing is."""
    error: Text | None
    """One sentence: why the newest attempt failed; None if it did not."""
    at_ns: int | None
    """When the snapshot that is shown was taken; None if there is none yet."""
    age_s: float | None
    """Seconds since then."""
    revision: int
    """Grows when something that is shown has changed."""


class StoreStatus(Model):
    """What the service has taken in, and how much of it is still there."""

    writable: bool
    """Whether what arrives can be kept."""
    error: Text | None
    """One sentence: why it cannot; None if it can."""
    revision: int
    """Grows with every change."""
    traces: int
    """Traces that are kept."""
    spans: int
    """Spans that are kept."""
    events: int
    """Lifecycle events that are kept."""
    samples: int
    """Distinct samples that the kept events name."""
    nbytes: int
    """Bytes on disk."""
    oldest_ns: int | None
    """The oldest trace or event that is kept; None if there is none."""


class TelemetryStatus(Model):
    """What became of the telemetry sent to the service since it was started."""

    ingested: dict[Text, int]
    """``spans`` and ``events`` that were new."""
    repeated: int
    """Spans and events that were there already: exporters sent them again."""
    refused: int
    """Spans, log records and data points that were kept out, which their senders were told of."""
    ignored: int
    """Log records that are no lifecycle events."""


class Status(Model):
    """The service in one look."""

    name: str
    """Always ``dataplane-admin``."""
    version: str
    """Of the distribution."""
    now_ns: int
    """The service's clock."""
    started_ns: int
    """When this process began."""
    live: LiveStatus
    store: StoreStatus
    telemetry: TelemetryStatus
    actions: bool
    """Whether actions are allowed."""
    subscribers: int
    """Connections that wait for live updates."""


class Liveness(Model):
    """The process serves."""

    status: Literal["ok"] = "ok"


class Readiness(Model):
    """Whether the service can take what is sent to it."""

    ready: bool
    """Whether what arrives can be kept, whether a data plane is there or not."""
    store: Text
    """``ok``, or why what arrives cannot be kept."""
    live: Text
    """``attached``, ``not asked for``, or why the data plane cannot be read."""


class Version(Model):
    """What serves."""

    name: str
    version: str
