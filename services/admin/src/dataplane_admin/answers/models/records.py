"""The audit record, metric series, and what live updates tell."""

from __future__ import annotations

from dataplane_admin.answers.models.base import Model, Text, Values


class AuditEntry(Model):
    """An action that somebody asked for, or what came of it: two entries that are alike but for
    their ``outcome``."""

    id: int
    time_ns: int
    actor: Text
    """How and from where: ``session 3f2b8c0d from 127.0.0.1``."""
    action: Text
    target: Text
    """The partition."""
    parameters: Values
    outcome: Text
    """``asked for``, written before it is done; then ``done: ...``, ``failed: ...`` or
    ``unknown: ...``."""


class Audit(Model):
    """A page of the audit record, the newest first."""

    entries: list[AuditEntry]
    next: str | None
    """The cursor of the next page; None if this is the last."""


class Series(Model):
    """What the points of one metric series come to: of one process, scope, metric and set of
    attributes."""

    name: Text
    process: Text
    """A label that no other process here has."""
    scope: Text
    """The instrumentation scope; empty if unknown."""
    unit: Text
    attributes: Values
    value: float | None
    """Of a counter what it counted since it was first seen, whatever the temporality; of a gauge
    its newest value; None of a histogram, and where nothing was recorded."""
    histogram: Values | None
    """``count`` and, where known, ``sum``, ``min``, ``max``, ``bounds`` and ``counts``; None of a
    single number."""
    time_ns: int | None
    """Of the last point, by the clock of its sender; None if it reported none."""
    received_ns: int
    """When the service received the last point."""


class Changed(Model):
    """The event ``changed`` of the live updates."""

    store: int
    """Revision of the store."""
    live: int
    """Revision of the live snapshot."""
