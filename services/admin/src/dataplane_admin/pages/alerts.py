"""Alerts page: raised alerts, and the latest cleared ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dataplane_admin import models
from dataplane_admin.pages import words
from dataplane_admin.pages.learning import number
from dataplane_admin.pages.links import Link, to
from dataplane_admin.service import AdminService

_SECONDS = frozenset({"no_step", "blocked", "telemetry_lost"})
_TELEMETRY = frozenset({"telemetry_lost", "telemetry_dropped"})
_SHARES = frozenset({"store_full", "reward_collapsed"})


@dataclass(frozen=True)
class AlertRow:
    """An alert as the page shows it; ``url`` is the page that shows its cause."""

    facts: models.Alert
    url: Link
    about: str
    value: str
    bound: str


@dataclass(frozen=True)
class AlertsPage:
    """Content of the page."""

    facts: models.Alerts
    raised: Sequence[AlertRow]
    cleared: Sequence[AlertRow]


def alerts_page(service: AdminService) -> AlertsPage:
    """Return the page."""
    facts = service.alerts()
    return AlertsPage(facts, [*map(_row, facts.raised)], [*map(_row, facts.cleared)])


def _row(alert: models.Alert) -> AlertRow:
    return AlertRow(
        facts=alert,
        url=_cause(alert),
        about=alert.run_id or alert.subject or "data plane",
        value=_figure(alert.kind, alert.value),
        bound=_figure(alert.kind, alert.bound),
    )


def _cause(alert: models.Alert) -> Link:
    if alert.kind in ("blocked", "no_step", "store_full"):
        return to("/", run=alert.run_id)
    run = to("/run", run=alert.run_id)
    return run if alert.kind in _TELEMETRY else Link(f"{run}#learning")


def _figure(kind: str, value: float) -> str:
    if kind in _SECONDS:
        return words.ago(value)
    return f"{100 * value:.3g} %" if kind in _SHARES else number(value)
