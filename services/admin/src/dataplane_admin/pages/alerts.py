"""Values and links of the alerts page."""

from __future__ import annotations

from dataplane_admin import models
from dataplane_admin.alerts.rules import FRACTIONS, SECONDS
from dataplane_admin.pages import words
from dataplane_admin.pages.learning import number
from dataplane_admin.pages.links import Link, to

_OF_RUN = frozenset({"run_failed", "telemetry_lost", "telemetry_dropped"})


def cause(alert: models.Alert) -> Link:
    """Return the URL of the page that shows the cause of an alert."""
    if alert.kind in ("blocked", "no_step", "store_full"):
        return to("/", run=alert.run_id)
    run = to("/run", run=alert.run_id)
    return run if alert.kind in _OF_RUN else Link(f"{run}#learning")


def figure(kind: str, value: float) -> str:
    """Return a value or bound of an alert in the unit of its kind; empty if it has none."""
    if kind == "run_failed":
        return ""
    if kind in SECONDS:
        return words.ago(value)
    return f"{100 * value:.3g} %" if kind in FRACTIONS else number(value)
