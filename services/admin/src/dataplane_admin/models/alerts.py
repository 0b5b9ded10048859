"""Alerts: conditions of runs and stores that rules describe."""

from __future__ import annotations

from typing import Literal

from dataplane_admin.models.base import Model, Text

AlertKind = Literal[
    "run_failed",
    "no_step",
    "blocked",
    "reward_collapsed",
    "telemetry_lost",
    "telemetry_dropped",
    "store_full",
    "staleness",
    "logprob_gap",
    "not_finite",
    "metric",
]
AlertSeverity = Literal["warning", "critical"]


class Alert(Model):
    """A condition that a rule describes, raised until it is cleared."""

    id: int
    name: Text
    """Name of the rule."""
    kind: AlertKind
    severity: AlertSeverity
    run_id: Text
    """The run; empty for a store, and for tasks of the data plane."""
    subject: Text
    """The store, such as ``storage unit u1``; ``telemetry`` is this service's database. For
    ``metric``, its attributes, such as ``{format}``. Else empty."""
    value: float
    """Newest value beyond the bound; the number of such metrics for ``not_finite``."""
    bound: float
    """Bound that the value crossed, in the unit of the kind."""
    sentence: Text
    raised_ns: int
    cleared_ns: int | None
    """Time at which it was cleared; None while it is raised."""


class WebhookStatus(Model):
    """Notifications of one webhook. Counters are those of this service since its start."""

    name: Text
    pending: int
    """Stored notifications that are not delivered, of all services on the database."""
    error: Text
    """Error of the newest attempt to send the oldest pending notification; empty without one."""
    delivered: int
    failed: int
    """Failed delivery attempts."""
    dropped: int
    """Dropped notifications: refused by the receiver, not delivered in time, or beyond the maximum
    that is stored."""


class Alerts(Model):
    """Raised alerts, and the latest cleared ones."""

    raised: list[Alert]
    """The most severe first, then the newest."""
    cleared: list[Alert]
    """The latest cleared first."""
    rules: int
    """Number of rules."""
    idle_rules: list[str]
    """Rules that compared nothing in the newest evaluation, because no run that they apply to
    reports their metric."""
    evaluated_ns: int | None
    """Time of the newest evaluation by this service; None before the first. If several services
    share a database, only one evaluates."""
    failed_evaluations: int
    """Failed evaluations by this service since it started."""
    webhooks: list[WebhookStatus]
