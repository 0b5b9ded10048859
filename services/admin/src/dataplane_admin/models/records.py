"""The audit log, metric series, and events of live updates."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from dataplane_admin.models.base import Model, Text, Values


class AuditEntry(Model):
    """An entry of the audit log: an action's request or outcome, or an alert raised or cleared."""

    id: int
    time_ns: int
    actor: Text
    """Authentication and address: ``session 3f2b8c0d from 127.0.0.1``; ``alerts`` for an alert."""
    action: Text
    target: Text
    """The partition, the run, or the subject of an alert."""
    parameters: Values
    outcome: Text
    """``requested``, written before the action; then ``done: ...``, ``failed: ...`` or
    ``unknown: ...``; of an alert ``raised: ...`` or ``cleared: ...``."""


class Audit(Model):
    """A page of the audit log, newest first."""

    entries: list[AuditEntry]
    next: str | None
    """The cursor of the next page; None if this is the last."""


class Series(Model):
    """Aggregate of one metric series: of one process, scope, metric and set of attributes."""

    name: Text
    process: Text
    """Label of the process, unique in this answer."""
    scope: Text
    """The instrumentation scope; empty if unknown."""
    unit: Text
    attributes: Values
    value: float | None
    """Total of a counter since it was first seen, or newest value of a gauge.

    None for a histogram, and if nothing was recorded. The value is the same for delta and
    cumulative points."""
    histogram: Annotated[Values, Field(title="Histogram")] | None
    """``count`` and, if known, ``sum``, ``min``, ``max``, ``bounds`` and ``counts``; None for a
    single number."""
    time_ns: int | None
    """Time of the last point, by its sender's clock; None if not reported."""
    received_ns: int
    """Receive time of the last point."""


class Changed(Model):
    """The event ``changed`` of the live updates."""

    store: int
    """Revision of the store."""
    live: int
    """Revision of the live snapshot."""
